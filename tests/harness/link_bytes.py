"""Small models that train and evaluate in a virtual world, and what each rank has received meanwhile over its links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from harness.counting_backend import CountingBackend
from harness.model_links import Crossing
from harness.worlds import TurnLanes, run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.lanes import ThreadLanes
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.config.schema import Config
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.members import PlannedWorld
from megatron_zpp.training.plan.program import Cross
from megatron_zpp.training.run_plan import RunPlan, plan_as_given
from megatron_zpp.training.step import token_losses
from testbed.session import RankPlace, Session

CPU = torch.device("cpu")
TINY = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 40 --make-vocab-size-divisible-by 8 --mock-data "
    "--train-iters 10 --attention-dropout 0 --quantization-block-size 32 --micro-batch-size 2 --zero-stage 3"
)
FULL = "--recompute-granularity full --recompute-method"
STEPS, EVALUATED = 2, 3  # micro-batches are evaluated after each step


@dataclass(frozen=True)
class Case:
    """Flags, and the world that they train in."""

    flags: str
    grid: Grid


@dataclass(frozen=True)
class Seen:
    """What one rank has seen, and the plan of its run."""

    ledger: Ledger
    calls: list[tuple[str, int]]
    received_bytes: int
    trained: int  # micro-batches
    plan: RunPlan

    @property
    def evaluated(self) -> int:
        """Micro-batches."""
        return STEPS * EVALUATED

    def by_closed_form(self, link: Callable[[Config, Grid], tuple[Crossing, Crossing]]) -> tuple[Crossing, Crossing]:
        """What all micro-batches of training take, and all of evaluation."""
        forward, whole = link(self.plan.config, self.plan.grid)
        return self.trained * whole, self.evaluated * forward

    @property
    def planned_crossings(self) -> int:
        """The collectives over links of the model in all steps, by the plan."""
        return STEPS * sum(isinstance(item, Cross) for item in self.plan.step.items(self.plan.microbatches))


def session_of(case: Case, backend: CountingBackend, lanes: ThreadLanes) -> Session:
    grid = case.grid
    tensor, context = f"--tensor-model-parallel-size {grid.tensor_ranks}", f"--context-parallel-size {grid.context_ranks}"
    flags = f"{TINY} {case.flags} --ranks-per-node {grid.ranks_per_node} {tensor} {context}"
    return Session(flags, RankPlace(backend, lanes, CPU))


def seen_by_ranks(case: Case) -> list[Seen]:
    """What every rank of the world sees while it trains and evaluates."""
    ranks = run_world(case.grid, partial(_train_and_evaluate, case))
    config, padded_vocab = ranks[0][0].config, ranks[0][0].padded_vocab
    plan = plan_as_given(config, PlannedWorld(case.grid.nodes, case.grid.ranks_per_node, is_on_gpu=False), padded_vocab)
    return [
        Seen(session.engine.links.ledger, counted.calls, counted.received_bytes, STEPS * session.microbatches, plan)
        for session, counted in ranks
    ]


def _train_and_evaluate(case: Case, backend: VirtualBackend) -> tuple[Session, CountingBackend]:
    counted = CountingBackend(backend)
    session = session_of(case, counted, TurnLanes())
    for step in range(STEPS):
        session.step(step)
        session.model.eval()
        with torch.no_grad():
            for number in range(EVALUATED):
                token_losses(session.model, session.batch(number), CPU)
    session.close()
    return session, counted
