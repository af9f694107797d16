"""What each use exchanges over the tensor link, against the table in its file. tests/training compares it with the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from harness.small_gpt import small_config
from megatron_zpp.model.tensor_work import LOSS_BYTES, tensor_work
from megatron_zpp.parallel.link_work import NO_LINK_WORK, LinkWork, LinkWorkOfUses

from megatron_zpp.model.shapes import ModelShape

LAYERS, HIDDEN, LENGTH, SAMPLES, ELEMENT_BYTES = 6, 64, 32, 3, 2
TOKENS = SAMPLES * LENGTH
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
SOME = {"recompute_granularity": "full", "recompute_method": "block"}


def work(ranks: int, sequence_parallel: bool = False, samples: int = SAMPLES, **changes: Any) -> LinkWorkOfUses:
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 8, "kv_channels": 8, "seq_length": LENGTH}
    shape = ModelShape(small_config(**{**sizes, **changes}), 256, ranks, 0, sequence_parallel)
    return tensor_work(shape, samples=samples, element_bytes=ELEMENT_BYTES)


def forward(uses: LinkWorkOfUses) -> tuple[int, int]:
    """Bytes and collectives of an evaluation."""
    alone = LinkWorkOfUses(uses.forward)
    return alone.nbytes, alone.collectives


def more(uses: LinkWorkOfUses, than: LinkWorkOfUses) -> tuple[int, int]:
    """Bytes and collectives that are added."""
    return uses.nbytes - than.nbytes, uses.collectives - than.collectives


def part_of_hidden(ranks: int) -> int:
    """r X of the table."""
    return (ranks - 1) * TOKENS * HIDDEN * ELEMENT_BYTES // ranks


def test_one_tensor_rank_receives_nothing() -> None:
    assert work(1, **FULL) == NO_LINK_WORK and NO_LINK_WORK.nbytes == 0


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_without_recomputation_a_micro_batch_takes_8_sums_per_block_and_4_more_or_10_and_4_with_sequence_parallelism(
    ranks: int, dropout: float
) -> None:
    loss = (ranks - 1) * LOSS_BYTES * TOKENS
    for sequence_parallel, per_block in ((False, 8), (True, 10)):
        found = work(ranks, sequence_parallel, hidden_dropout=dropout)
        sums, in_forward = per_block * LAYERS + 4, 4 * LAYERS + 2
        assert (found.nbytes, found.collectives) == (sums * part_of_hidden(ranks) + loss, sums + 1)
        assert forward(found) == (in_forward * part_of_hidden(ranks) + loss, in_forward + 1)


@pytest.mark.parametrize(
    ("changes", "repeated_blocks", "chunks"),
    [
        ({"recompute_granularity": "selective"}, 0, 0),
        ({**FULL, "recompute_num_layers": 1}, LAYERS, LAYERS),
        ({**FULL, "recompute_num_layers": 4}, LAYERS, 2),
        ({**SOME, "recompute_num_layers": 2}, 2, 2),
    ],
)
def test_recomputation_repeats_a_blocks_forward_but_not_the_last_sum_of_a_chunk(
    changes: dict[str, Any], repeated_blocks: int, chunks: int
) -> None:
    for sequence_parallel, last_sum in ((False, 2), (True, 1)):
        plain, found = work(4, sequence_parallel), work(4, sequence_parallel, **changes)
        repeated = 4 * repeated_blocks - last_sum * chunks
        assert more(found, plain) == (repeated * part_of_hidden(4), repeated)
        assert found.forward == plain.forward


@pytest.mark.parametrize(("recomputed", "chunks"), [({**FULL, "recompute_num_layers": 4}, 2), ({**SOME, "recompute_num_layers": 3}, 3)])
def test_divided_inputs_are_gathered_once_per_chunk_and_own_tokens_never(recomputed: dict[str, Any], chunks: int) -> None:
    plain, divided = work(4, **recomputed), work(4, **recomputed, partition_activations=True)
    assert more(divided, plain) == (chunks * part_of_hidden(4), chunks)
    assert divided.forward == plain.forward
    assert work(4, True, **recomputed, partition_activations=True) == work(4, True, **recomputed)


def test_the_loss_in_chunks_takes_as_many_bytes_in_more_gathers() -> None:
    assert more(work(2, loss_chunk_tokens=36), work(2)) == (0, 2)


def test_hidden_states_that_the_ranks_do_not_share_evenly_are_padded_to_16_bytes_for_each() -> None:
    found = work(4, samples=1, hidden_size=24, seq_length=3)
    part = 48  # 3 x 24 x 2 bytes are 144, of which 4 ranks have 36 each
    backward = sum(found.backward, LinkWork())
    assert backward.nbytes == (4 * LAYERS + 2) // 2 * 2 * 3 * part and backward.collectives == 4 * LAYERS + 2


def test_forward_waits_for_everything_and_sequence_parallelism_hides_more_of_backward() -> None:
    plain, divided = work(4), work(4, True)
    assert all(use.overlapped_bytes == 0 for uses in (plain, divided) for use in uses.forward)
    block = 1
    assert plain.backward[block].overlapped_bytes == plain.backward[block].blocking_bytes
    assert divided.backward[block].overlapped_bytes == 2 * divided.backward[block].blocking_bytes
    assert all(of.backward[-1].overlapped_bytes == 0 for of in (plain, divided))
    assert divided.backward[block].blocking_bytes == plain.backward[block].blocking_bytes


def test_backward_waits_for_the_input_of_the_last_chunk_and_the_others_are_gathered_in_the_block_before() -> None:
    chunks = {**FULL, "recompute_num_layers": 3}
    plain, divided = (work(4, **chunks, partition_activations=divides) for divides in (False, True))
    added = [
        (there.blocking_bytes - here.blocking_bytes, there.overlapped_bytes - here.overlapped_bytes)
        for here, there in zip(plain.backward, divided.backward, strict=True)
    ]
    last_block = [(0, 0)] * (LAYERS + 2)
    last_block[LAYERS] = (part_of_hidden(4), part_of_hidden(4))
    assert added == last_block
    assert plain.forward == divided.forward
