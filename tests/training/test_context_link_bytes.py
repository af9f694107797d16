"""What ranks that divide samples exchange: as many bytes as the closed form and the plan of the run say, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from gpu.session import RankPlace, Session
from harness.counting_backend import CountingBackend
from harness.worlds import TurnLanes, run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Category, Ledger, Traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.link_work import LinkWorkOfUses
from megatron_zpp.training.run_plan import PlannedWorld, RunPlan, plan_as_given
from megatron_zpp.training.sharding import divided_samples
from megatron_zpp.training.step import token_losses

pytestmark = pytest.mark.virtual

CPU = torch.device("cpu")
TINY = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 40 --make-vocab-size-divisible-by 8 --mock-data "
    "--train-iters 10 --attention-dropout 0 --quantization-block-size 32 --micro-batch-size 2 --zero-stage 3"
)
FULL = "--recompute-granularity full --recompute-method"
STEPS, EVALUATED = 2, 3
PAIR, FOUR, TWO_NODES, BOTH = Grid.of_nodes(1, 2), Grid.of_nodes(1, 4), Grid.of_nodes(2, 2), Grid.of_nodes(1, 4, 2)


@dataclass(frozen=True)
class Case:
    """The world, the number of context ranks, and flags."""

    world: Grid
    context_ranks: int
    flags: str = ""


CASES = {
    "2 ranks": Case(PAIR, 2),
    "4 ranks, bf16, 2 micro-batches": Case(FOUR, 4, "--bf16 --global-batch-size 4"),
    "2 sample groups, rotary, fewer key heads": Case(FOUR, 2, "--position-embedding-type rope --num-query-groups 2 --swiglu"),
    "1 key head, which 4 ranks get": Case(FOUR, 4, "--num-query-groups 1"),
    "2 nodes": Case(TWO_NODES, 4, "--num-query-groups 2"),
    "selective": Case(PAIR, 2, "--recompute-granularity selective"),
    "full": Case(PAIR, 2, f"{FULL} uniform --recompute-num-layers 2"),
    "some blocks": Case(PAIR, 2, f"{FULL} block --recompute-num-layers 2 --num-query-groups 1"),
    "ranks that share layers": Case(BOTH, 2, "--loss-chunk-tokens 3"),
    "ranks that share layers and tokens, full": Case(BOTH, 2, f"--sequence-parallel --num-query-groups 1 {FULL} uniform"),
}


@dataclass(frozen=True)
class Found:
    """What one rank has seen, and the plan of its run."""

    ledger: Ledger
    calls: list[tuple[str, int]]
    session: Session
    plan: RunPlan


def train_and_evaluate(case: Case, backend: VirtualBackend) -> Found:
    """Evaluates after each step."""
    counted, grid = CountingBackend(backend), backend.grid
    flags = f"{TINY} {case.flags} --ranks-per-node {grid.ranks_per_node} --tensor-model-parallel-size {grid.tensor_ranks}"
    session = Session(f"{flags} --context-parallel-size {case.context_ranks}", RankPlace(counted, TurnLanes(), CPU))
    for step in range(STEPS):
        session.step(step)
        session.model.eval()
        with torch.no_grad():
            for number in range(EVALUATED):
                token_losses(session.model, session.batch(number), CPU)
    session.close()
    plan = plan_as_given(session.config, PlannedWorld(grid.nodes, grid.ranks_per_node, is_on_gpu=False), session.padded_vocab)
    return Found(session.engine.ladder.ledger, counted.calls, session, plan)


def world_of(case: Case) -> Grid:
    world = case.world
    return Grid(world.world_size, world.ranks_per_node, world.partition_ranks, world.tensor_ranks, case.context_ranks)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_and_evaluation_take_the_bytes_of_the_closed_form_and_of_the_plan(case: Case) -> None:
    grid = world_of(case)
    for found in run_world(grid, partial(train_and_evaluate, case)):
        session, ledger = found.session, found.ledger
        samples, element_bytes = session.config.training.micro_batch_size, session.engine.dtype.itemsize
        work = divided_samples(session.config).work(samples=samples, element_bytes=element_bytes)
        forward, trained, evaluated = LinkWorkOfUses(work.forward), STEPS * session.microbatches, STEPS * EVALUATED
        exchanged = ledger.total(Category.EXCHANGES)
        assert exchanged == sum([found.plan.context_traffic] * STEPS, Traffic()) != Traffic()
        assert exchanged.context_bytes == trained * work.nbytes
        assert ledger.total(Category.EVALUATION).context_bytes == evaluated * forward.nbytes
        assert ledger.total(Category.ACTIVATIONS).tensor_bytes == STEPS * found.plan.job.microbatches * found.plan.job.tensor_work.nbytes
        if grid.tensor_ranks == 1:
            assert len(found.calls) == trained * work.collectives + evaluated * forward.collectives


def test_between_nodes_go_the_parts_of_the_ranks_that_are_there() -> None:
    """Of 4 ranks on 2 nodes each gets 2 of 3 parts from the other node."""
    case = CASES["2 nodes"]
    for found in run_world(world_of(case), partial(train_and_evaluate, case)):
        exchanged = found.ledger.total(Category.EXCHANGES)
        assert 3 * exchanged.context_inter_bytes == 2 * exchanged.context_bytes > 0
        assert found.ledger.context_inter_node_bytes(exchanged) == 2 * exchanged.context_inter_bytes
