"""The engine on streams: no two accesses without an order, every wait needed, and few waits of computation.

The streams are those of a model machine (tests/harness/fake_streams). It drives the engine's own StreamLanes, Staging, hooks and
snapshots, and finds a missing wait whether or not a GPU would have hit it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from harness.codes import lean
from harness.fake_streams.accesses import RaceError
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.fake_streams.machine import Site
from harness.fake_streams.sources import ordering_lines
from harness.planned_engine import planned_step
from harness.small_engine import LEARNING_RATE, ROWS, SECONDARY_ROW, Job, ModelShape, Rank, train_world

from megatron_zpp.checkpoint.snapshot import HostSnapshot
from megatron_zpp.comm.code import Code, LinkCodes, Rotation
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.plan.kinds import COPY, PAYLOADS
from megatron_zpp.zero.loss_scaler import DynamicLossScaler, LossScaler
from megatron_zpp.zero.pieces import owned_pieces
from megatron_zpp.zero.policy import (
    POLICIES,
    ZEROPP,
    Policy,
    Rung,
    with_gradients_summed_on_secondary,
    with_offloaded_optimizer,
    with_quantized_gradients,
    with_secondary_weights,
)
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

EQUAL = ModelShape(inner=(16, 16))  # buffers of equal size are reused at once
LONGER = ModelShape(inner=(16, 16, 16))
ROTATED = with_quantized_gradients(POLICIES[3], LinkCodes(Code(4, Rotation.HADAMARD), Code(8, Rotation.HADAMARD)))
LEAN = with_gradients_summed_on_secondary(lean(3))
LEAN_IN_STAGE_1 = lean(1, bits=1)
OF_OTHER_TESTS = {"operation.py", "kept_places.py"}  # tests/comm/test_tensor_link_streams.py and test_kept_places.py leave out their lines
ORDERS_NOTHING = {"timers.py"}
SAVES_AND_EVALUATES = "saves and evaluates"

History = list[tuple[str, str]]  # loss and gradient norm of each step, written out: a norm may be NaN


@dataclass(frozen=True)
class Outcome:
    """histories: of each rank. needed: see Machine. planned: bytes of buffers in the planned step. taken: the most of a rank's pool."""

    histories: list[History]
    needed: set[Site]
    planned: int
    taken: int


@dataclass(frozen=True)
class Case:
    """A job in a world. does_more: a snapshot is copied and the model is evaluated between steps."""

    world: tuple[int, int]
    job: Job
    does_more: bool = False

    def run(self, without: Site | None = None) -> Outcome:
        of_ranks = run_on_gpus(self.world, self._train, without=without)
        histories, needed, taken = zip(*of_ranks, strict=True)
        return Outcome(list(histories), set().union(*needed), self._planned_buffers(), max(taken))

    def _train(self, gpu: Gpu) -> tuple[History, set[Site], int]:
        rank = Rank(self.job, gpu.backend, lanes=gpu.lanes, streams=gpu.machine)
        history = written(self._with_more(rank, gpu) if self.does_more else rank.train())
        return history, gpu.machine.needed, rank.engine.links.staging.allocated_bytes

    def _planned_buffers(self) -> int:
        """The bytes of buffers in the planned step: payloads on their way, and secondary rungs if they are kept."""
        planned = planned_step(self.job, Grid.of_nodes(*self.world), is_on_gpu=True).memory.on_device
        return planned.get(PAYLOADS, 0) + (planned.get(COPY, 0) if self.job.policy.weights_in_step is Rung.SECONDARY else 0)

    def _with_more(self, rank: Rank, gpu: Gpu) -> list[tuple[float, float]]:
        snapshot = HostSnapshot(list(owned_pieces(rank.engine)), gpu.machine)
        history = []
        for step in range(self.job.steps):
            rank.engine.finish_differences()
            snapshot.begin()
            with gpu.accesses.paused():
                before = [piece.values.clone() for piece in owned_pieces(rank.engine)]
            losses = []
            for microbatch in range(self.job.microbatches):
                losses.append(rank.loss(step, microbatch))
                rank.backward(losses[-1], microbatch)
            snapshot.copy()  # as late as the thread of --async-save may copy: the update waits for it
            norm = rank.engine.step(LEARNING_RATE).grad_norm
            history.append((sum(loss.item() for loss in losses) / len(losses), norm))
            for piece, values in zip(snapshot.pieces, before, strict=True):
                assert torch.equal(piece.values, values)
            with torch.no_grad():
                rank.loss(50)
        rank.engine.close()
        return history


def written(history: list[tuple[float, float]]) -> History:
    return [(loss.hex(), norm.hex()) for loss, norm in history]


def overflowing() -> LossScaler:
    """A loss scale with which the first step of an fp16 run is skipped."""
    return DynamicLossScaler(scale=2.0**17, hysteresis=1)


def short_job(policy: Policy = POLICIES[3], dtype: torch.dtype = torch.float32, shape: ModelShape = EQUAL, **changes: Any) -> Job:
    return Job(policy, dtype, shape, **{"steps": 2, **changes})


def skipping_job(policy: Policy, **changes: Any) -> Job:
    return short_job(policy, torch.float16, steps=3, loss_scaler=overflowing, **changes)


CASES = {
    "stage 0": Case((2, 2), skipping_job(POLICIES[0])),
    "stage 1": Case((2, 2), short_job(POLICIES[1])),
    "stage 2": Case((3, 1), short_job(POLICIES[2])),
    "stage 3": Case((2, 2), skipping_job(POLICIES[3])),
    "secondary row": Case((2, 2), short_job(SECONDARY_ROW, shape=replace(EQUAL, is_recomputed=True))),
    "micro-batches": Case((2, 2), short_job(shape=LONGER, microbatches=2)),
    "no prefetch": Case((1, 2), short_job(shape=LONGER, prefetch=Prefetch(0, 0))),
    "ZeRO++": Case((2, 2), short_job(ZEROPP, torch.bfloat16, replace(LONGER, is_recomputed=True, chunk=2), microbatches=2)),
    "hpZ alone": Case((2, 2), short_job(with_secondary_weights(POLICIES[3]), shape=replace(EQUAL, is_tied=False))),
    "rotated": Case((2, 2), short_job(ROTATED, torch.bfloat16)),
    "full precision at first": Case((2, 2), short_job(ZEROPP, full_precision_iterations=1, steps=3)),
    "a world of one": Case((1, 1), short_job()),
    SAVES_AND_EVALUATES: Case((2, 2), short_job(), does_more=True),
    "ZeRO++ saves and evaluates": Case((2, 2), short_job(ZEROPP, microbatches=2), does_more=True),
    "lean": Case((2, 2), short_job(LEAN, torch.bfloat16, microbatches=2, block_numel=256), does_more=True),
    "lean in stage 1": Case((2, 2), short_job(LEAN_IN_STAGE_1, torch.bfloat16, block_numel=256)),
    "offloaded stage 3": Case((2, 2), short_job(with_offloaded_optimizer(POLICIES[3]), torch.bfloat16, microbatches=2)),
    "offloaded ZeRO++": Case((2, 2), skipping_job(with_offloaded_optimizer(ZEROPP), full_precision_iterations=1), does_more=True),
    "offloaded lean in stage 1": Case(
        (2, 1), short_job(with_offloaded_optimizer(LEAN_IN_STAGE_1), torch.bfloat16, steps=3, block_numel=256)
    ),
}


@cache
def outcome(name: str) -> Outcome:
    return CASES[name].run()


@pytest.mark.parametrize("name", CASES)
def test_no_two_accesses_lack_an_order_and_bits_are_those_of_the_lanes_thread(name: str) -> None:
    assert outcome(name).histories == [written(history) for history in train_world(CASES[name].world, CASES[name].job)]


@pytest.mark.parametrize("name", [*ROWS, "ZeRO++"])
def test_the_planned_buffers_are_those_of_the_pool_and_at_most_a_tenth_more(name: str) -> None:
    assert outcome(name).taken <= outcome(name).planned <= 1.1 * outcome(name).taken


def test_each_line_whose_wait_or_event_orders_anything_is_missed_when_it_has_no_effect() -> None:
    cases_of: dict[Site, list[str]] = {}
    for name in CASES:
        for site in outcome(name).needed:
            cases_of.setdefault(site, []).append(name)
    survivors = [site for site, names in cases_of.items() if not any(is_caught(CASES[name], site) for name in names)]
    lines = {site for file, sites in ordering_lines().items() if file not in OF_OTHER_TESTS | ORDERS_NOTHING for site in sites}
    assert sorted(map(str, lines - set(cases_of))) == []  # no line of the package that is never reached, or never orders anything
    assert sorted(map(str, survivors)) == []


def is_caught(case: Case, site: Site) -> bool:
    try:
        case.run(without=site)
    except RaceError:
        return True
    return False


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.job.loss_scaler])
def test_the_cases_with_skipped_steps_skip_the_first_one(name: str) -> None:
    is_finite = [math.isfinite(float.fromhex(norm)) for _, norm in outcome(name).histories[0]]
    assert is_finite == [False, True, True]
