from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.sampler import MicroBatchIndices, MicroBatchSampler, WholePassSampler
from megatron_zpp.system.user_error import UserError

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
    with pytest.raises(UserError, match="no sample"):
        MicroBatchSampler(0, 0, 1, 0, 1)


@pytest.mark.parametrize("arguments", [(5, 0, 1, 2, 2), (5, 0, 1, -1, 2), (5, 0, 0, 0, 1), (5, -1, 1, 0, 1)])
def test_impossible_arguments_are_refused(arguments: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(RuntimeError):
        MicroBatchSampler(*arguments)


@given(total=st.integers(1, 60), size=st.integers(1, 5), ranks=st.integers(1, 6))
def test_a_whole_pass_meets_every_sample_once_in_full_micro_batches_of_equal_number(total: int, size: int, ranks: int) -> None:
    samplers = [WholePassSampler(total, size, rank, ranks) for rank in range(ranks)]
    per_pass = samplers[0].microbatches
    assert {sampler.microbatches for sampler in samplers} == {per_pass} and (per_pass - 1) * size * ranks < total <= per_pass * size * ranks
    for first in (0, per_pass):
        batches = [batch for sampler in samplers for batch in islice(sampler, first, first + per_pass)]
        assert all(len(batch.samples) == size for batch in batches)
        assert sorted(sample for batch in batches for sample in batch.samples[: size - batch.padding]) == list(range(total))


def test_the_picture_of_a_whole_pass_over_five_samples() -> None:
    found = [[(batch.samples, batch.padding) for batch in islice(WholePassSampler(5, 2, rank, 2), 3)] for rank in range(2)]
    assert found[0] == [((0, 1), 0), ((4, 4), 1), ((0, 1), 0)]
    assert found[1] == [((2, 3), 0), ((4, 4), 2), ((2, 3), 0)]


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8), size=st.integers(1, 3), ranks=st.integers(1, 4), stop=st.integers(0, 7))
def test_global_batches_that_grow_neither_lose_nor_repeat_a_sample_also_over_a_restart(
    sizes: list[int], size: int, ranks: int, stop: int
) -> None:
    def consumed(micro_batches: list[int], start: int) -> list[int]:
        samplers = [iter(MicroBatchSampler(UNBOUNDED, start, size, rank, ranks)) for rank in range(ranks)]
        return [sample for count in micro_batches for _ in range(count) for sampler in samplers for sample in next(sampler).samples]

    before = consumed(sizes[:stop], 0)
    assert before + consumed(sizes[stop:], len(before)) == consumed(sizes, 0) == list(range(sum(sizes) * size * ranks))
