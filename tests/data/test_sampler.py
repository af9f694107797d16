from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.sampler import MicroBatchIndices, MicroBatchSampler

UNBOUNDED = 10**9


def take(count: int, *, total: int = UNBOUNDED, consumed: int = 0, size: int, rank: int = 0, ranks: int = 1) -> list[MicroBatchIndices]:
    return list(islice(MicroBatchSampler(total, consumed, size, rank, ranks), count))


def test_the_picture_of_two_ranks() -> None:
    assert [batch.samples for batch in take(4, size=2, rank=0, ranks=2)] == [(0, 1), (4, 5), (8, 9), (12, 13)]
    assert [batch.samples for batch in take(4, size=2, rank=1, ranks=2)] == [(2, 3), (6, 7), (10, 11), (14, 15)]


@given(
    batch=st.integers(0, 50),
    micro_batches=st.integers(1, 4),
    size=st.integers(1, 4),
    ranks=st.integers(1, 6),
)
def test_micro_batch_m_of_rank_r_starts_where_the_order_rule_says(batch: int, micro_batches: int, size: int, ranks: int) -> None:
    global_batch = micro_batches * size * ranks
    for rank in range(ranks):
        found = take(micro_batches, consumed=batch * global_batch, size=size, rank=rank, ranks=ranks)
        starts = [batch * global_batch + (m * ranks + rank) * size for m in range(micro_batches)]
        assert found == [MicroBatchIndices(start, tuple(range(start, start + size))) for start in starts]


@given(steps=st.integers(1, 4), micro_batches=st.integers(1, 4), size=st.integers(1, 4), ranks=st.integers(1, 6))
def test_one_process_meets_the_same_micro_batches_as_many_ranks(steps: int, micro_batches: int, size: int, ranks: int) -> None:
    count = steps * micro_batches
    together = [batch for rank in range(ranks) for batch in take(count, size=size, rank=rank, ranks=ranks)]
    assert sorted(together) == take(count * ranks, size=size)


@given(consumed=st.integers(0, 200), total=st.integers(1, 60), size=st.integers(1, 4), ranks=st.integers(1, 4), data=st.data())
def test_resuming_goes_on_where_the_run_stopped(consumed: int, total: int, size: int, ranks: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    done = data.draw(st.integers(0, 5))
    whole = take(done + 5, total=total, consumed=consumed, size=size, rank=rank, ranks=ranks)
    resumed = take(5, total=total, consumed=consumed + done * size * ranks, size=size, rank=rank, ranks=ranks)
    assert resumed == whole[done:]


@given(consumed=st.integers(0, 10), ranks=st.integers(1, 4), later_ranks=st.integers(1, 4))
def test_resuming_at_another_number_of_ranks_misses_and_repeats_no_sample(consumed: int, ranks: int, later_ranks: int) -> None:
    before = [
        i for rank in range(ranks) for batch in take(12 // ranks, consumed=consumed, size=1, rank=rank, ranks=ranks) for i in batch.samples
    ]
    after = [
        i
        for rank in range(later_ranks)
        for batch in take(12 // later_ranks, consumed=consumed + len(before), size=1, rank=rank, ranks=later_ranks)
        for i in batch.samples
    ]
    assert sorted(before + after) == list(range(consumed, consumed + len(before) + len(after)))


def test_a_short_dataset_starts_over_while_the_sample_number_counts_on() -> None:
    assert take(3, total=5, size=3) == [
        MicroBatchIndices(0, (0, 1, 2)),
        MicroBatchIndices(3, (3, 4, 0)),
        MicroBatchIndices(6, (1, 2, 3)),
    ]


def test_a_dataset_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no sample"):
        MicroBatchSampler(0, 0, 1, 0, 1)


@pytest.mark.parametrize("arguments", [(5, 0, 1, 2, 2), (5, 0, 1, -1, 2), (5, 0, 0, 0, 1), (5, -1, 1, 0, 1)])
def test_impossible_arguments_are_refused(arguments: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(RuntimeError):
        MicroBatchSampler(*arguments)
