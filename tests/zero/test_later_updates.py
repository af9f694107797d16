"""Updates on the host that wait for the next forward: who needs them gets them, in order, and a failed one is never passed over."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from harness.small_engine import Job, ModelShape, Rank
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.checkpoint.engine_state import EngineState
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.zero.optimizer import LaterUpdates, Update
from megatron_zpp.zero.pieces import owned_pieces, resting_pieces
from megatron_zpp.zero.policy import POLICIES, with_offloaded_optimizer
from megatron_zpp.zero.schedule import Prefetch
from megatron_zpp.zero.shard import full_weights

pytestmark = pytest.mark.virtual

JOB = Job(POLICIES[3], shape=ModelShape((17, 40, 16), hidden=40), prefetch=Prefetch(0, 0))
UNITS = 5  # embedding, three blocks, final norm
RATES = [(1e-2, 0.0), (3e-3, 0.1)]  # learning rate and weight decay of each step


def trained(backend: VirtualBackend, policy: object = with_offloaded_optimizer(POLICIES[3])) -> Rank:
    """A rank after some steps."""
    rank = Rank(Job(policy, JOB.dtype, JOB.shape, prefetch=JOB.prefetch), backend)  # type: ignore[arg-type]
    for step, (learning_rate, weight_decay) in enumerate(RATES):
        rank.accumulate(step)
        rank.engine.step(learning_rate, weight_decay)
    return rank


def state_of(rank: Rank) -> list[Tensor]:
    """Main weights and optimizer state as they are now."""
    return [tensor.clone() for tensor in (*(unit.main_weight for unit in rank.engine.units), *rank.engine.optimizer.live_tensors())]


def differing(one: list[Tensor], other: list[Tensor]) -> list[int]:
    return [index for index, (left, right) in enumerate(zip(one, other, strict=True)) if not torch.equal(left, right)]


@cache
def states_without_offload() -> list[list[Tensor]]:
    def program(backend: VirtualBackend) -> list[Tensor]:
        rank = trained(backend, POLICIES[3])
        rank.engine.close()
        return state_of(rank)

    return run_world((1, 2), program)


def evaluate(rank: Rank) -> None:
    with torch.no_grad():
        rank.loss(50)


READERS: dict[str, Callable[[Rank], object]] = {
    "the pieces that a save writes": lambda rank: list(owned_pieces(rank.engine)),
    "the pieces that a load fills": lambda rank: list(resting_pieces(rank.engine)),
    "the manifest of a checkpoint": lambda rank: EngineState(rank.engine).manifest(Progress(2, 0, 0), {}, with_moments=True),
    "what comes before a save": lambda rank: rank.engine.finish_differences(),
    "the state dict": lambda rank: dict(full_weights(rank.engine)),
    "the norm of the weights": lambda rank: rank.engine.weight_norm(),
    "an evaluation": evaluate,
    "a forward": lambda rank: rank.loss(3),
    "a backward that no forward came before": lambda rank: rank.engine.backward(torch.zeros((), requires_grad=True)),
    "the end": lambda rank: rank.engine.close(),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_needs_main_weights_or_moments_finds_those_of_the_last_step(reader: str) -> None:
    expected = states_without_offload()

    def program(backend: VirtualBackend) -> tuple[int, list[int], int]:
        rank = trained(backend)
        before = differing(state_of(rank), expected[backend.rank])
        READERS[reader](rank)
        found = differing(state_of(rank), expected[backend.rank]), rank.engine.optimizer.steps
        rank.engine.close()
        return sum(index < UNITS for index in before), *found

    # All units but the first, which climbs already, wait.
    assert run_world((1, 2), program) == [(UNITS - 1, [], len(RATES))] * 2


def test_each_unit_is_updated_just_before_its_climb_with_the_rates_of_its_step() -> None:
    def program(backend: VirtualBackend) -> list[str]:
        rank = trained(backend)
        events: list[str] = []
        update, engine = rank.engine.optimizer.update, rank.engine

        def noted(group: int, step: Update) -> None:
            assert (step.learning_rate, step.weight_decay) == RATES[-1]
            events.append(f"update {engine.units[group].name}")
            update(group, step)

        engine.optimizer.update = noted  # type: ignore[method-assign]
        for unit in engine.units:
            unit.wait = partial(_noting, events, f"use {unit.name}", unit.wait)  # type: ignore[method-assign]
        evaluate(rank)
        engine.close()
        return events

    blocks = [event for index in range(3) for event in (f"update block.{index}", f"use block.{index}")]
    expected = ["use embedding", *blocks, "update final_norm", "use final_norm", "use embedding"]
    assert run_world((1, 2), program) == [expected] * 2


def _noting(events: list[str], event: str, call: Callable[..., None], *args: object) -> None:
    events.append(event)
    call(*args)


def test_main_weights_that_are_written_before_the_last_updates_are_an_error() -> None:
    def program(backend: VirtualBackend) -> None:
        rank = trained(backend)
        with pytest.raises(RuntimeError, match=r"call engine.finish_updates\(\) first"):
            rank.engine.weights_changed()
        rank.engine.finish_updates()
        rank.engine.weights_changed()
        rank.engine.close()

    run_world((1, 1), program)


class UpdateFailed(Exception):
    """What the optimizer raises in these tests."""


def close_after_a_failed_update(rank: Rank) -> None:
    def fail(*_: object) -> None:
        raise UpdateFailed("no memory")

    rank.engine.optimizer.update = fail  # type: ignore[method-assign]
    rank.engine.close()


def noting_drain(rank: Rank, drains: list[str], error: Exception | None = None) -> None:
    """Notes when the lanes have been drained, and raises the error then."""
    drain = rank.lanes.drain

    def noted() -> None:
        drain()
        drains.append("drained")
        if error is not None:
            raise error

    rank.lanes.drain = noted


def test_a_failed_update_at_the_end_leaves_no_message_under_way_and_no_hook() -> None:
    def program(backend: VirtualBackend) -> None:
        rank, drains = trained(backend), list[str]()
        noting_drain(rank, drains)
        with pytest.raises(UpdateFailed):
            close_after_a_failed_update(rank)
        assert drains == ["drained"]
        with pytest.raises(RuntimeError, match="closed"):
            evaluate(rank)
        rank.engine.close()  # is over already
        assert drains == ["drained"]

    run_world((1, 2), program)


def test_if_the_lanes_fail_too_the_end_reports_the_update_and_the_error_of_the_lanes_as_its_context() -> None:
    def program(backend: VirtualBackend) -> None:
        rank = trained(backend)
        noting_drain(rank, [], ConnectionError("the link is cut"))
        with pytest.raises(UpdateFailed) as raised:
            close_after_a_failed_update(rank)
        assert isinstance(raised.value.__context__, ConnectionError)

    run_world((1, 2), program)


# ---- the order alone


def waiting(fails_at: int | None = None) -> tuple[LaterUpdates, list[int]]:
    """Three groups that wait, and the numbers of those that have been updated."""
    made: list[int] = []

    def update(group: int) -> None:
        if group == fails_at:
            raise MemoryError(f"no memory for group {group}")
        made.append(group)

    later = LaterUpdates([["a"], ["b", "c"], ["d"]])
    later.begin(update)
    return later, made


def test_reaching_a_unit_makes_all_updates_up_to_its_group_and_each_once() -> None:
    later, made = waiting()
    for unit, expected in (("a", [0]), ("c", [0, 1]), ("b", [0, 1]), ("a", [0, 1]), ("d", [0, 1, 2]), ("d", [0, 1, 2])):
        later.reach(unit)
        assert made == expected


def test_the_next_step_begins_after_the_updates_of_the_last_one() -> None:
    later, made = waiting()
    later.begin(lambda group: made.append(group + 10))
    assert made == [0, 1, 2]
    later.finish()
    assert made == [0, 1, 2, 10, 11, 12]


def test_a_failed_update_raises_its_own_error_and_afterwards_names_it_whoever_asks() -> None:
    later, made = waiting(fails_at=1)
    with pytest.raises(MemoryError, match="no memory for group 1"):
        later.reach("d")
    for ask in (later.finish, lambda: later.reach("a"), lambda: later.begin(made.append)):
        with pytest.raises(RuntimeError, match="the weights are those of no step") as raised:
            ask()
        assert isinstance(raised.value.__cause__, MemoryError)
    assert made == [0]
