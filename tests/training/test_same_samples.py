"""Ranks that share layers or divide samples read the same ones, or the run ends and names two of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.data.documents import DocumentRules
from megatron_zpp.data.loader import MicroBatch, MicroBatches
from megatron_zpp.data.sampler import MicroBatchSampler
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.same_samples import SameSamples, checksum

GRID = Grid(8, 4, 2, 2)
TOKENS = torch.arange(12).view(2, 6)


def batch(first_sample: int = 4, shift: int = 0) -> MicroBatch:
    return MicroBatch(TOKENS + shift, TOKENS + shift + 1, torch.ones(2, 6), first_sample)


def engine_of(other: MicroBatch, at: int, calls: list[Tensor], grid: Grid = GRID, first: int = 0) -> Any:
    """An engine in whose world every rank has the caller's micro-batch, but rank `at` has `other`.

    first: what the first rank of the engine's world is called.
    """

    def gather_world(own: Tensor) -> Tensor:
        calls.append(own)
        rows = own.expand(grid.world_size, -1).clone()
        rows[at] = torch.tensor([checksum(other), other.first_sample], dtype=own.dtype)
        return rows.view(grid.data_ranks, grid.tensor_ranks, -1)

    links = SimpleNamespace(grid=grid, ranks=range(first, first + grid.world_size))
    return SimpleNamespace(device=torch.device("cpu"), gather_world=gather_world, links=links)


@pytest.mark.parametrize(
    ("other", "at", "words"),
    [
        (batch(shift=1), 5, "ranks 4 and 5 share layers .--tensor-model-parallel-size 2., but their micro-batches differ: from sample 4"),
        (batch(first_sample=6), 2, "ranks 2 and 3 share layers.*from sample 6 on with checksum .* on rank 2, from sample 4 on"),
    ],
)
def test_a_rank_with_other_tokens_or_samples_ends_the_run_and_both_ranks_are_named(other: MicroBatch, at: int, words: str) -> None:
    check = SameSamples(engine_of(other, at, []))
    with pytest.raises(RuntimeError, match=words):
        check.read(batch())


@pytest.mark.parametrize(
    ("grid", "at", "words"),
    [
        (Grid(8, 4, 4, 1, 4), 6, "ranks 4 and 6 divide samples .--context-parallel-size 4., but their micro-batches differ"),
        (
            Grid(8, 8, 2, 2, 2),
            7,
            "ranks 4 and 7 share layers .--tensor-model-parallel-size 2. and divide samples .--context-parallel-size 2., but",
        ),
        (Grid(8, 8, 2, 2, 2), 4, "ranks 4 and 5 share layers"),
    ],
)
def test_all_ranks_that_share_samples_are_compared(grid: Grid, at: int, words: str) -> None:
    check = SameSamples(engine_of(batch(shift=1), at, [], grid))
    with pytest.raises(RuntimeError, match=words):
        check.read(batch())


def test_ranks_of_an_island_are_named_as_ranks_of_the_world() -> None:
    check = SameSamples(engine_of(batch(shift=1), 5, [], first=8))
    with pytest.raises(RuntimeError, match="ranks 12 and 13 share layers.* on rank 12, from sample 4 on with checksum .* on rank 13"):
        check.read(batch())
    same = [1.0] * 24  # of the evaluation of three islands
    with pytest.raises(RuntimeError, match="ranks 20 and 21 share layers.* on rank 20, checksum 00000002 of all so far on rank 21"):
        check.compare([*same[:21], 2.0, *same[22:]])


def test_labels_count_as_well_as_tokens() -> None:
    assert checksum(batch()) != checksum(replace(batch(), labels=TOKENS))


def test_ranks_of_other_data_ranks_have_other_samples() -> None:
    for grid in (GRID, Grid(8, 8, 2, 2, 2)):
        groups = torch.arange(8) // (grid.tensor_ranks * grid.context_ranks)
        engine = engine_of(batch(), 0, [], grid)
        engine.gather_world = lambda own, groups=groups, grid=grid: (own + groups[:, None]).view(grid.data_ranks, grid.tensor_ranks, -1)
        check = SameSamples(engine)
        check.read(batch())
        check.compare([check.numbers[0] + group for group in groups.tolist()])


def test_where_no_ranks_share_samples_nothing_is_sent_or_computed() -> None:
    calls: list[Tensor] = []
    check = SameSamples(engine_of(batch(), 0, calls, Grid(4, 4, 4, 1)))
    check.read(batch())
    check.compare([1.0, 2.0, 3.0, 4.0])
    numbers = torch.zeros(2)
    assert check.append_to(numbers) is numbers and check.differ(torch.arange(4.0)) is None
    assert (check.numbers, calls) == ([], [])


def test_the_first_micro_batch_of_another_set_is_compared_too_and_not_with_the_numbers_of_a_step() -> None:
    check = SameSamples(engine_of(batch(), 0, []))
    check.read(batch())
    with pytest.raises(RuntimeError, match="ranks 0 and 1 share layers"):
        check.of_another_set().read(batch(shift=1))
    assert check.numbers == [checksum(batch())]


class Samples:
    def __init__(self, damaged: int | None = None) -> None:
        self._damaged = damaged

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        tokens = TOKENS[0].numpy() + index + (index == self._damaged)
        return {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(6).numpy()}


def read_by(check: SameSamples, damaged: int | None = None) -> float:
    """The checksum after three micro-batches, from sample 2 on."""
    rules = DocumentRules(eod=0, resets_positions=False, resets_attention=False, masks_loss=False)
    batches = MicroBatches(Samples(damaged), MicroBatchSampler(8, 2, 1, 0, 1), 0, rules, check.read)
    assert [next(batches).first_sample for _ in range(3)] == [2, 3, 4]
    (found,) = check.numbers
    return found


def test_a_later_micro_batch_that_differs_is_found_with_the_numbers_of_its_step_and_only_the_first_takes_a_message() -> None:
    calls: list[Tensor] = []
    engine = SimpleNamespace(
        device=torch.device("cpu"),
        gather_world=lambda own: calls.append(own) or own.expand(8, -1).view(GRID.data_ranks, GRID.tensor_ranks, -1),
        links=SimpleNamespace(grid=GRID, ranks=range(GRID.world_size)),
    )
    good, bad = SameSamples(engine), SameSamples(engine)  # type: ignore[arg-type]
    sums = [read_by(good)] * 8
    good.compare(sums)
    assert len(calls) == 1
    assert not good.differ(torch.tensor(sums))
    sums[5] = read_by(bad, damaged=4)
    assert good.differ(torch.tensor(sums))
    with pytest.raises(RuntimeError, match="ranks 4 and 5 share layers .*checksum .* of all so far on rank 4, checksum .* on rank 5; they"):
        good.compare(sums)
