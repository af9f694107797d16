"""What each use exchanges over the tensor link, against the sums that are counted by hand."""

from __future__ import annotations

import pytest
from harness.small_gpt import small_config

from megatron_zpp.model.tensor_work import tensor_work
from megatron_zpp.parallel.tensor_work import NO_TENSOR_WORK, TensorWorkOfUses

BLOCKS, TOKENS, HIDDEN = 4, 2 * 32, 64
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}


def work(ranks: int = 4, *, sequence_parallel: bool = False, **changes: object) -> TensorWorkOfUses:
    config = small_config(num_layers=BLOCKS, hidden_size=HIDDEN, num_attention_heads=8, seq_length=32, **changes)
    return tensor_work(config, 2, 2, tensor_ranks=ranks, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("sequence_parallel", "of_block"), [(False, 8), (True, 10)])
def test_a_micro_batch_moves_what_the_closed_form_says(ranks: int, sequence_parallel: bool, of_block: int) -> None:
    """(8 L + 4) r X, with sequence parallelism (10 L + 4) r X, and 12 bytes of each token for the loss from every other rank."""
    moved = (ranks - 1) * TOKENS * HIDDEN * 2 // ranks
    loss = 12 * (ranks - 1) * TOKENS
    assert work(ranks, sequence_parallel=sequence_parallel).nbytes == (of_block * BLOCKS + 4) * moved + loss


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_full_recomputation_repeats_forward_but_for_the_last_sum_of_a_chunk_without_dropout(sequence_parallel: bool) -> None:
    moved = 3 * TOKENS * HIDDEN * 2 // 4
    kept = work(sequence_parallel=sequence_parallel).nbytes
    last_sum = 1 if sequence_parallel else 2
    for blocks_per_chunk, chunks in ((1, 4), (2, 2), (4, 1)):
        again = work(sequence_parallel=sequence_parallel, hidden_dropout=0.0, recompute_num_layers=blocks_per_chunk, **FULL).nbytes - kept
        assert again == (4 * BLOCKS - last_sum * chunks) * moved
    assert work(sequence_parallel=sequence_parallel, hidden_dropout=0.1, recompute_num_layers=2, **FULL).nbytes - kept == 4 * BLOCKS * moved


def test_selective_recomputation_repeats_nothing() -> None:
    assert work(recompute_granularity="selective") == work()


def test_one_rank_alone_exchanges_nothing() -> None:
    assert work(1) == NO_TENSOR_WORK and NO_TENSOR_WORK.nbytes == 0


def test_forward_waits_for_all_and_sequence_parallelism_hides_more_of_backward() -> None:
    plain, divided = work(), work(sequence_parallel=True)
    for uses in (plain, divided):
        assert all(use.overlapped_bytes == 0 for use in uses.forward)
    block = 1
    assert plain.backward[block].overlapped_bytes == plain.backward[block].blocking_bytes
    assert divided.backward[block].overlapped_bytes == 2 * divided.backward[block].blocking_bytes
    assert divided.backward[block].blocking_bytes == plain.backward[block].blocking_bytes
