"""What each use exchanges over the tensor link adds up to the closed form of all uses."""

from __future__ import annotations

from typing import Any

import pytest
from harness.small_gpt import small_config

from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.model.tensor_traffic import tensor_traffic
from megatron_zpp.model.tensor_work import tensor_work
from megatron_zpp.parallel.link_work import NO_LINK_WORK, LinkWork, LinkWorkOfUses

FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
CHUNKS: list[dict[str, Any]] = [
    {},
    {"recompute_granularity": "selective"},
    *({**FULL, "recompute_num_layers": count} for count in (1, 2, 4)),
    {**FULL, "recompute_num_layers": 3, "partition_activations": True},
]


def shape(ranks: int, sequence_parallel: bool, **changes: Any) -> ModelShape:
    config = small_config(num_layers=4, hidden_size=48, num_attention_heads=8, kv_channels=8, seq_length=32, **changes)
    return ModelShape(config, 256, ranks, 0, sequence_parallel)


def work(ranks: int, sequence_parallel: bool, **changes: Any) -> LinkWorkOfUses:
    return tensor_work(shape(ranks, sequence_parallel, **changes), samples=3, element_bytes=2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recomputed", CHUNKS, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_uses_add_up_to_the_closed_form(ranks: int, dropout: float, recomputed: dict[str, Any], sequence_parallel: bool) -> None:
    changes = {"hidden_dropout": dropout, **recomputed}
    traffic = tensor_traffic(shape(ranks, sequence_parallel, **changes), microbatches=1, samples=3, element_bytes=2)
    uses = work(ranks, sequence_parallel, **changes)
    assert (uses.nbytes, uses.collectives) == (traffic.training.nbytes, traffic.training.collectives)
    forward = sum(uses.forward, LinkWork())
    assert (forward.nbytes, forward.collectives) == (traffic.evaluation.nbytes, traffic.evaluation.collectives)


def test_one_rank_alone_exchanges_nothing() -> None:
    assert work(1, False) == NO_LINK_WORK and NO_LINK_WORK.nbytes == 0


def test_forward_waits_for_everything_and_sequence_parallelism_hides_more_of_backward() -> None:
    plain, divided = work(4, False), work(4, True)
    assert all(use.overlapped_bytes == 0 for uses in (plain, divided) for use in uses.forward)
    block = 1
    assert plain.backward[block].overlapped_bytes == plain.backward[block].blocking_bytes
    assert divided.backward[block].overlapped_bytes == 2 * divided.backward[block].blocking_bytes
    assert all(of.backward[-1].overlapped_bytes == 0 for of in (plain, divided))
    assert divided.backward[block].blocking_bytes == plain.backward[block].blocking_bytes


def test_backward_waits_for_the_input_of_the_last_chunk_and_the_others_are_gathered_in_the_block_before() -> None:
    chunks = {**FULL, "recompute_num_layers": 2}
    plain, divided = (work(4, False, **chunks, partition_activations=divides) for divides in (False, True))
    more = [
        (there.blocking_bytes - here.blocking_bytes, there.overlapped_bytes - here.overlapped_bytes)
        for here, there in zip(plain.backward, divided.backward, strict=True)
    ]
    gather = 3 * 3 * 32 * 48 * 2 // 4
    assert more == [(0, 0), (0, 0), (0, 0), (0, 0), (gather, gather), (0, 0)]
    assert plain.forward == divided.forward
