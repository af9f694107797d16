"""The closed form of what ranks exchange that divide samples, in figures that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest
from harness.small_gpt import small_config
from megatron_zpp.model.context_traffic import DividedSamples
from megatron_zpp.parallel.link_work import NO_LINK_WORK, LinkWork

SAMPLES, LENGTH, HEADS, CHANNELS, BYTES = 3, 64, 8, 4, 2
SHAPE: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": HEADS, "kv_channels": CHANNELS, "seq_length": LENGTH}


def divided(context_ranks: int, tensor_ranks: int = 1, **changes: Any) -> DividedSamples:
    return DividedSamples(small_config(**(SHAPE | changes)), context_ranks, tensor_ranks)


@pytest.mark.parametrize(
    ("context_ranks", "tensor_ranks", "key_heads", "channels"),
    [
        (2, 1, 8, (2 * 32 + 2 * 32) // 2),  # a rank gets half of the queries, keys, values and outputs
        (4, 1, 8, (2 * 32 + 2 * 32) // 4),
        (2, 2, 8, (2 * 16 + 2 * 16) // 2),  # half of all heads are those of one tensor rank
        (4, 1, 4, (2 * 32 + 2 * 16) // 4),
        (4, 1, 2, 2 * 32 // 4 + 2 * 4),  # 2 ranks get the same key head
        (8, 1, 1, 2 * 32 // 8 + 2 * 4),
        (2, 4, 2, 2 * 8 // 2 + 2 * 4),  # tensor ranks have copies of a key head already
    ],
)
def test_a_rank_receives_of_every_other_its_tokens_of_the_own_heads_and_back(
    context_ranks: int, tensor_ranks: int, key_heads: int, channels: int
) -> None:
    samples = divided(context_ranks, tensor_ranks, num_query_groups=key_heads)
    forward, backward = (samples.exchanges(samples=SAMPLES, element_bytes=BYTES, is_backward=is_backward) for is_backward in (False, True))
    of_others = (context_ranks - 1) * SAMPLES * LENGTH // context_ranks
    assert forward == LinkWork(of_others * channels * BYTES, collectives=2)
    outputs = of_others * HEADS * CHANNELS // (tensor_ranks * context_ranks) * BYTES
    assert backward == LinkWork(forward.nbytes - outputs, outputs, collectives=2)


@pytest.mark.parametrize(
    ("kind", "recomputed"),
    [
        ({}, 0),
        ({"recompute_granularity": "selective"}, 0),
        ({"recompute_granularity": "full", "recompute_num_layers": 2}, 4),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}, 3),
    ],
)
def test_backward_exchanges_as_much_as_forward_and_recomputed_blocks_once_more(kind: dict[str, Any], recomputed: int) -> None:
    samples = divided(4, **kind)
    forward, backward = (samples.exchanges(samples=SAMPLES, element_bytes=BYTES, is_backward=is_backward) for is_backward in (False, True))
    of_uses = samples.work(samples=SAMPLES, element_bytes=BYTES)
    assert of_uses.forward == (LinkWork(), *[forward] * 4, LinkWork())
    assert of_uses.backward == (LinkWork(), *[backward + forward] * recomputed, *[backward] * (4 - recomputed), LinkWork())
    assert backward.nbytes == forward.nbytes


def test_what_hides_an_exchange_of_backward_is_one_product_of_a_block() -> None:
    """H = A = 32, F = 128, S = 64: of forward, 2 H A = 2048 of 2 H (4 A + 2 F) + 2 A S = 24576 + 4096 operations per token."""
    assert divided(4, ffn_hidden_size=128).work(samples=1, element_bytes=2).hiding == 2048 / 28672


def test_a_rank_with_whole_samples_exchanges_nothing() -> None:
    alone = divided(1)
    assert alone.own == alone.config and alone.work(samples=1, element_bytes=2) == NO_LINK_WORK
