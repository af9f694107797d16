from __future__ import annotations

from harness.small_gpt import small_config
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.model.chunks import recomputed_blocks, recomputed_chunks, recomputes_attention

layers = st.integers(1, 12)


@given(layers, st.integers(1, 12))
def test_uniform_chunks_hold_every_block_once_in_order_and_only_the_last_is_shorter(layers: int, length: int) -> None:
    config = small_config(num_layers=layers, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=length)
    chunks = recomputed_chunks(config)
    assert [block for chunk in chunks for block in chunk] == list(range(layers))
    assert all(len(chunk) == length for chunk in chunks[:-1]) and 1 <= len(chunks[-1]) <= length
    assert recomputed_blocks(config) == layers


@given(st.integers(1, 12))
def test_block_recomputes_the_first_blocks_one_by_one(count: int) -> None:
    config = small_config(num_layers=12, recompute_granularity="full", recompute_method="block", recompute_num_layers=count)
    assert [list(chunk) for chunk in recomputed_chunks(config)] == [[block] for block in range(count)]
    assert recomputed_blocks(config) == count


def test_attention_alone_has_no_chunks() -> None:
    config = small_config(recompute_granularity="selective")
    assert recomputes_attention(config) and recomputed_chunks(config) == ()
    assert not recomputes_attention(small_config()) and recomputed_chunks(small_config()) == ()
