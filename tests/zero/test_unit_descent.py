from __future__ import annotations

import pytest
import torch
from harness.small_engine import Job, Rank
from harness.worlds import run_world
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.policy import POLICIES

pytestmark = pytest.mark.virtual


def collect_everywhere(gradient: UnitGradient, value: float) -> None:
    """Every parameter of the unit brings a gradient of this value."""
    for index, placed in enumerate(gradient.layout.params):
        gradient.collect(index, torch.full(placed.spec.shape, value))


def ends_with_gradients_of(value: float, rank: Rank) -> bool:
    """Whether all that the rank's optimizer reads, without padding, has this value. Closes the engine."""
    own = [
        gradient.primary.range(segment.offset, segment.offset + segment.stop - segment.start)
        for gradient in rank.engine.gradients
        for segment in gradient.layout.segments(rank.engine.links.own_slice, 1)
    ]
    rank.engine.close()
    return bool(own) and all(bool((part == value).all()) for part in own)


def test_what_has_been_collected_stays_until_it_has_descended_whoever_waits_for_the_descent_before() -> None:
    """A unit that is complete may wait for one that descends before it, and is still in the queue of the micro-batch before."""

    def program(backend: VirtualBackend) -> bool:
        rank = Rank(Job(POLICIES[3], microbatches=2), backend)
        staging = rank.engine.links.staging
        for gradient in rank.engine.gradients:
            for microbatch in (1.0, 2.0):
                collect_everywhere(gradient, microbatch)
                gradient.finish()
                other = staging.take(gradient.layout.numel * 4)
                other.fill_(0xA5)  # whatever else needs a buffer of this size
                staging.give(other)
                gradient.descend(is_last_microbatch=microbatch == 2.0)
            gradient.finish()
        return ends_with_gradients_of(3.0, rank)

    assert all(run_world((1, 2), program))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_micro_batch_that_brings_no_gradient_leaves_the_one_before_as_it_is(stage: int) -> None:
    """It descends (stage 3), or is in the sums (stage 1)."""

    def program(backend: VirtualBackend) -> bool:
        rank = Rank(Job(POLICIES[stage], microbatches=2), backend)
        for gradient in rank.engine.gradients:
            collect_everywhere(gradient, 3.0)
            gradient.descend(is_last_microbatch=False)
            gradient.fill_missing()
            gradient.descend(is_last_microbatch=True)
            gradient.finish()
        return ends_with_gradients_of(3.0, rank)

    assert all(run_world((1, 2), program))


def test_a_finish_with_nothing_under_way_books_and_changes_nothing() -> None:
    def program(backend: VirtualBackend) -> bool:
        rank = Rank(Job(POLICIES[3]), backend)
        for gradient in rank.engine.gradients:
            gradient.finish()
        free = dict(rank.engine.links.staging._free)
        rank.engine.close()
        return not free

    assert all(run_world((1, 2), program))


class Operations(TorchDispatchMode):
    """Counts how many tensors each operation on several tensors writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func._schema.name in ("aten::_foreach_copy_", "aten::_foreach_add_"):
            self.written.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [1, 3])
def test_all_gradients_of_one_dimension_of_a_unit_are_taken_by_one_operation(stage: int) -> None:
    def program(backend: VirtualBackend) -> None:
        rank = Rank(Job(POLICIES[stage], torch.bfloat16), backend)
        gradient = rank.engine.gradients[1]
        layout = gradient.layout
        dims = [len(placed.spec.shape) for placed in layout.params]
        with Operations() as operations:
            for index, placed in enumerate(layout.params):
                gradient.collect(index, torch.full(placed.spec.shape, float(index + 1), dtype=torch.bfloat16))
            values = gradient._collector.take()
        assert operations.written == [1, 1, dims.count(1)] and dims.count(1) > 2
        for index, placed in enumerate(layout.params):
            assert bool((values.range(placed.offset, placed.offset + placed.numel) == index + 1).all())
        gradient._collector.release()
        rank.engine.close()

    run_world((1, 2), program)
