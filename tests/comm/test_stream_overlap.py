"""How long computation waits on streams, in simulated time: uses of known length, collectives of known length, nothing else takes time."""

from __future__ import annotations

from functools import partial

import pytest
from harness.fake_streams.gpus import run_on_gpus
from harness.fake_streams.timed_model import BACKWARD, FORWARD, step_time

from megatron_zpp.comm.links import INTER_CLIMB, INTER_DESCEND, INTRA_CLIMB, INTRA_DESCEND
from megatron_zpp.parallel.topology import Lane
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

USES = 12


def slowest_step(
    world: tuple[int, int], times: dict[Lane, float], microbatches: int, prefetch: Prefetch = Prefetch(), update: float = 0.0
) -> float:
    """The time of a step on the slowest rank. update: the time of the second update of each step."""
    options = EngineOptions(POLICIES[3], block_numel=32, prefetch=prefetch)
    job = partial(step_time, options=options, uses=USES, microbatches=microbatches, update=update)
    return max(run_on_gpus(world, job, times=times))


def slowdown(world: tuple[int, int], times: dict[Lane, float], microbatches: int, prefetch: Prefetch = Prefetch()) -> float:
    """The time of a step divided by that of its computation alone."""
    return slowest_step(world, times, microbatches, prefetch) / (USES * (FORWARD + BACKWARD) * microbatches)


# A buffer that any stream may take would hold computation up for 1.24 and 1.09 times the time of computing.
@pytest.mark.parametrize(
    "world, intra, inter, microbatches, most",
    [((1, 4), 0.8, 0.0, 1, 1.05), ((2, 2), 0.2, 0.9, 2, 1.05)],
    ids=["one node", "two nodes"],
)
def test_hops_shorter_than_a_use_hide_behind_computation(
    world: tuple[int, int], intra: float, inter: float, microbatches: int, most: float
) -> None:
    times = {INTRA_CLIMB: intra, INTRA_DESCEND: intra, INTER_CLIMB: inter, INTER_DESCEND: inter}
    assert 1.0 <= slowdown(world, times, microbatches) <= most


def test_without_prefetch_each_climb_holds_computation_up() -> None:
    # Forward waits for each of the 12 climbs, and backward for 11: the last use keeps its weights.
    found = slowdown((1, 4), {INTRA_CLIMB: 0.5}, 1, Prefetch(0, 0))
    assert found == pytest.approx(1 + (USES + USES - 1) * 0.5 / (USES * (FORWARD + BACKWARD)))


def test_what_the_next_step_needs_first_climbs_while_the_rest_is_updated() -> None:
    times, computing = {INTRA_CLIMB: 0.5}, USES * (FORWARD + BACKWARD)
    climbs = USES + USES - 1  # all of them hold computation up, as above; but the first hides behind the update
    assert slowest_step((1, 4), times, 1, Prefetch(0, 0), update=7.0) == pytest.approx(computing + 7.0 + (climbs - 1) * 0.5)
