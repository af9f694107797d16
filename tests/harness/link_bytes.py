"""Small models that train and evaluate in a virtual world, and what each rank has received meanwhile over its links."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from gpu.session import RankPlace, Session
from megatron_zpp.parallel.link_work import LinkWorkOfUses

from harness.counting_backend import CountingBackend
from harness.worlds import TurnLanes, run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.lanes import ThreadLanes
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.members import PlannedWorld
from megatron_zpp.training.run_plan import RunPlan, plan_as_given
from megatron_zpp.training.step import token_losses

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

    def nbytes(self, work: LinkWorkOfUses) -> int:
        """What all micro-batches take by the closed form."""
        return self.trained * work.nbytes + self.evaluated * LinkWorkOfUses(work.forward).nbytes

    def collectives(self, work: LinkWorkOfUses) -> int:
        return self.trained * work.collectives + self.evaluated * LinkWorkOfUses(work.forward).collectives


def session_of(case: Case, backend: CountingBackend, lanes: ThreadLanes) -> Session:
    grid = case.grid
    tensor, context = f"--tensor-model-parallel-size {grid.tensor_ranks}", f"--context-parallel-size {grid.context_ranks}"
    flags = f"{TINY} {case.flags} --ranks-per-node {grid.ranks_per_node} {tensor} {context}"
    return Session(flags, RankPlace(backend, lanes, CPU))


def seen_by_ranks(case: Case) -> list[Seen]:
    """What every rank of the world sees while it trains and evaluates."""
    return run_world(case.grid, partial(_train_and_evaluate, case))


def _train_and_evaluate(case: Case, backend: VirtualBackend) -> Seen:
    counted, grid = CountingBackend(backend), case.grid
    session = session_of(case, counted, TurnLanes())
    for step in range(STEPS):
        session.step(step)
        session.model.eval()
        with torch.no_grad():
            for number in range(EVALUATED):
                token_losses(session.model, session.batch(number), CPU)
    session.close()
    plan = plan_as_given(session.config, PlannedWorld(grid.nodes, grid.ranks_per_node, is_on_gpu=False), session.padded_vocab)
    return Seen(session.engine.ladder.ledger, counted.calls, counted.received_bytes, STEPS * session.microbatches, plan)
