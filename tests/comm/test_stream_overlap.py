"""How long computation waits on streams, in simulated time: uses of known length, collectives of known length, nothing else takes time."""

from __future__ import annotations

from functools import partial

import pytest
from harness.fake_streams.gpus import run_on_gpus
from harness.fake_streams.timed_model import BACKWARD, FORWARD, step_time

from megatron_zpp.comm.links import INTER_CLIMB, INTER_DESCEND, INTRA_CLIMB, INTRA_DESCEND
from megatron_zpp.parallel.topology import Lane
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES, Policy, with_offloaded_optimizer, with_secondary_weights
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

USES = 8


def slowest_step(
    world: tuple[int, int],
    times: dict[Lane, float],
    microbatches: int,
    prefetch: Prefetch = Prefetch(),
    update: float = 0.0,
    policy: Policy = POLICIES[3],
) -> float:
    """The time of a step on the slowest rank. update: the time of the second update of each step; on the host, of that of each unit."""
    options = EngineOptions(policy, block_numel=32, prefetch=prefetch)
    job = partial(step_time, options=options, uses=USES, microbatches=microbatches, update=update)
    return max(run_on_gpus(world, job, times=times))


def slowdown(world: tuple[int, int], times: dict[Lane, float], microbatches: int, prefetch: Prefetch = Prefetch()) -> float:
    """The time of a step divided by that of its computation alone."""
    return slowest_step(world, times, microbatches, prefetch) / (USES * (FORWARD + BACKWARD) * microbatches)


# Buffers that any stream may take, the latest first, would make both longer.
@pytest.mark.parametrize(
    "world, intra, inter, microbatches, most",
    [((1, 2), 0.8, 0.0, 1, 1.05), ((2, 2), 0.2, 0.9, 2, 1.05)],
    ids=["one node", "two nodes"],
)
def test_hops_shorter_than_a_use_hide_behind_computation(
    world: tuple[int, int], intra: float, inter: float, microbatches: int, most: float
) -> None:
    times = {INTRA_CLIMB: intra, INTRA_DESCEND: intra, INTER_CLIMB: inter, INTER_DESCEND: inter}
    assert 1.0 <= slowdown(world, times, microbatches) <= most


def test_without_prefetch_each_climb_holds_computation_up() -> None:
    # Forward waits for each of the 8 climbs, and backward for 7: the last use keeps its weights.
    found = slowdown((1, 2), {INTRA_CLIMB: 0.5}, 1, Prefetch(0, 0))
    assert found == pytest.approx(1 + (USES + USES - 1) * 0.5 / (USES * (FORWARD + BACKWARD)))


def test_what_the_next_step_needs_first_climbs_while_the_rest_is_updated() -> None:
    times, computing = {INTRA_CLIMB: 0.5}, USES * (FORWARD + BACKWARD)
    climbs = USES + USES - 1  # all of them hold computation up, as above; but the first hides behind the update
    assert slowest_step((1, 2), times, 1, Prefetch(0, 0), update=7.0) == pytest.approx(computing + 7.0 + (climbs - 1) * 0.5)


@pytest.mark.parametrize(
    ("world", "policy", "prefetch", "microbatches", "update"),
    [
        ((2, 1), POLICIES[3], Prefetch(), 1, FORWARD / 2),
        ((1, 2), POLICIES[3], Prefetch(), 1, 3 * FORWARD),
        ((2, 2), with_secondary_weights(POLICIES[3]), Prefetch(0, 0), 2, FORWARD),
        ((2, 1), POLICIES[1], Prefetch(3, 2), 1, 2 * FORWARD),
    ],
    ids=["stage 3, updates are shorter", "stage 3, updates are longer", "hpZ", "stage 1"],
)
def test_the_device_computes_while_its_host_updates_the_units_that_come_next(
    world: tuple[int, int], policy: Policy, prefetch: Prefetch, microbatches: int, update: float
) -> None:
    """A use is enqueued when every unit that has to climb by then has been updated, and computed when it is enqueued and its turn."""
    ahead = max(prefetch.inter_uses, prefetch.intra_uses)
    computed = 0.0
    for use in range(USES):
        enqueued = update * min(USES, use + 1 + ahead)
        computed = max(computed, enqueued) + FORWARD
    expected = computed + (microbatches - 1) * USES * FORWARD + microbatches * USES * BACKWARD
    found = slowest_step(world, {}, microbatches, prefetch, update, with_offloaded_optimizer(policy))
    assert found == pytest.approx(expected)
