from __future__ import annotations

import pytest
import torch
from harness.small_engine import Job, Rank
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.zero.policy import POLICIES

pytestmark = pytest.mark.virtual


def test_what_has_been_collected_stays_until_it_has_descended_whoever_waits_for_the_descent_before() -> None:
    """A unit that is complete may wait for one that descends before it, and is still in the queue of the micro-batch before."""

    def program(backend: VirtualBackend) -> bool:
        rank = Rank(Job(POLICIES[3], microbatches=2), backend)
        staging = rank.engine.ladder.staging
        for descent, gradient in zip(rank.engine._unit_descents, rank.engine.gradients, strict=True):
            for microbatch in (1.0, 2.0):
                for index, placed in enumerate(gradient.layout.params):
                    descent.collect(index, torch.full(placed.spec.shape, microbatch))
                descent.finish()
                other = staging.take(gradient.layout.numel * 4)
                other.fill_(0xA5)  # whatever else needs a buffer of this size
                staging.give(other)
                descent.descend(is_last_microbatch=microbatch == 2.0)
            descent.finish()
        own = [
            gradient.primary.range(segment.offset, segment.offset + segment.stop - segment.start)
            for gradient in rank.engine.gradients
            for segment in gradient.layout.segments(rank.engine.ladder.own_slice, 1)
        ]
        rank.engine.close()
        return bool(own) and all(bool((part == 3.0).all()) for part in own)

    assert all(run_world((1, 2), program))


def test_a_finish_with_nothing_under_way_books_and_changes_nothing() -> None:
    def program(backend: VirtualBackend) -> bool:
        rank = Rank(Job(POLICIES[3]), backend)
        for descent in rank.engine._unit_descents:
            descent.finish()
        free = dict(rank.engine.ladder.staging._free)
        rank.engine.close()
        return not free

    assert all(run_world((1, 2), program))
