"""What the tensor link carries in training and in evaluation: as many bytes as the closed form says, and the same list on every rank."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest
from harness.counting_backend import CountingBackend
from harness.link_bytes import FULL, STEPS, Case, seen_by_ranks, session_of
from harness.model_links import tensor_link
from harness.worlds import TurnLanes, run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.lanes import ThreadLanes
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.shared_gradients import sharing_received_bytes

pytestmark = pytest.mark.virtual

SEQUENCE = "--sequence-parallel"
PAIR, FOUR, TWO_PAIRS = Grid.of_nodes(1, 2, 2), Grid.of_nodes(1, 4, 4), Grid.of_nodes(1, 4, 2)

CASES = {
    "plain": Case("--hidden-dropout 0", FOUR),
    "hidden states of which ranks cannot have equal parts": Case("--hidden-size 36 --seq-length 7 --max-position-embeddings 8", FOUR),
    "2 micro-batches, untied, SwiGLU, rotary": Case(
        "--bf16 --global-batch-size 8 --untie-embeddings-and-output-weights --swiglu --position-embedding-type rope --disable-bias-linear",
        TWO_PAIRS,
    ),
    "selective": Case("--recompute-granularity selective", PAIR),
    "full": Case(f"{FULL} uniform --recompute-num-layers 2 --bf16", PAIR),
    "divided inputs": Case(f"{FULL} uniform --recompute-num-layers 2 --bf16 --partition-activations", FOUR),
    "divided inputs of some blocks in an arena, 2 micro-batches": Case(
        f"{FULL} block --recompute-num-layers 2 --partition-activations --contiguous-checkpointing --global-batch-size 8", TWO_PAIRS
    ),
    "some blocks, no dropout, loss in chunks": Case(
        f"{FULL} block --recompute-num-layers 2 --hidden-dropout 0 --loss-chunk-tokens 5", PAIR
    ),
    "sequence parallel, some blocks, untied, 2 micro-batches": Case(
        f"{SEQUENCE} {FULL} block --recompute-num-layers 1 --bf16 --global-batch-size 8 --untie-embeddings-and-output-weights", TWO_PAIRS
    ),
    "sequence parallel, selective": Case(f"{SEQUENCE} --recompute-granularity selective --swiglu --hidden-dropout 0", PAIR),
    "sequence parallel, full, loss in chunks": Case(f"{SEQUENCE} {FULL} uniform --recompute-num-layers 2 --loss-chunk-tokens 6", FOUR),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_and_evaluation_take_the_bytes_of_the_closed_form_under_categories_of_their_own(case: Case) -> None:
    for seen in seen_by_ranks(case):
        ledger, plan = seen.ledger, seen.plan
        training, evaluation = seen.by_closed_form(tensor_link)
        assert ledger.total(Category.ACTIVATIONS) == Traffic(tensor_bytes=training.nbytes) != Traffic()
        assert ledger.total(Category.EVALUATION).tensor_bytes == evaluation.nbytes
        assert STEPS * plan.step.traffic(Category.ACTIVATIONS).tensor_bytes == training.nbytes
        assert seen.received_bytes == (training + evaluation).nbytes + ledger.total(Category.REPLICAS).tensor_bytes
        assert len(seen.calls) == (training + evaluation).collectives + STEPS
        assert training.nbytes < ledger.total(Category.ACTIVATIONS, Category.REPLICAS).tensor_bytes <= STEPS * plan.tensor_bytes
        assert seen.planned_crossings == training.collectives + STEPS


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("flags", ["", f"{SEQUENCE} --num-query-groups 2 --qk-layernorm"], ids=["layer norms", "and shared keys"])
def test_shared_elements_cross_once_per_step_those_of_the_rung_on_which_the_optimizer_works(stage: int, flags: str) -> None:
    """In stage 3 each data rank sends those of its own slice, in stage 0 all of them."""
    grid = Grid.of_nodes(1, 8, 4)
    case = Case(f"--zero-stage {stage} --normalization RMSNorm {flags}", grid)

    def program(backend: VirtualBackend) -> tuple[int, int]:
        session = session_of(case, CountingBackend(backend), TurnLanes())
        for step in range(STEPS):
            session.step(step)
        params = [param for unit in session.model.unit_specs() for param in unit.params]
        numel = sum(shared.stop - shared.start for param in params for shared in param.division.shared())
        session.close()
        return numel, session.engine.links.ledger.total(Category.REPLICAS).tensor_bytes

    found = run_world(grid, program)
    for tensor_rank in range(grid.tensor_ranks):
        numels, nbytes = zip(*found[tensor_rank :: grid.tensor_ranks], strict=True)
        copies = 1 if stage == 3 else grid.data_ranks
        assert sum(nbytes) == STEPS * copies * sharing_received_bytes(numels[0], grid.tensor_ranks) > 0


def calls_with_pauses(flags: str, steps: int, backend: VirtualBackend) -> list[tuple[str, int]]:
    generator, of_lanes = random.Random(backend.rank), random.Random(100 + backend.rank)
    counted = CountingBackend(backend, lambda: time.sleep(generator.choice([0.0, 0.0, 0.0002, 0.001])))
    lanes = ThreadLanes(pause=lambda: time.sleep(of_lanes.choice([0.0, 0.0005, 0.002])))
    session = session_of(Case(flags, backend.grid), counted, lanes)
    for step in range(steps):
        session.step(step)
    session.close()
    return counted.calls


def check_lists(flags: str, steps: int, limit_seconds: float = 120.0) -> None:
    grid = Grid.of_nodes(2, 4, 2)
    calls = run_world(grid, partial(calls_with_pauses, flags, steps), limit_seconds, takes_turns=False)
    assert all(calls[rank] == calls[grid.rank_of(grid.data_rank_of(rank), 0)] for rank in range(grid.world_size))
    assert len(calls[0]) >= steps * 10


HUNTED = f"{FULL} uniform --recompute-num-layers 2 --global-batch-size 16"


def test_with_random_pauses_in_lanes_and_tensor_calls_all_ranks_of_a_group_make_the_same_calls() -> None:
    check_lists(f"{HUNTED} {SEQUENCE}", 1)


@pytest.mark.long
@pytest.mark.parametrize("sequence", ["", SEQUENCE])
def test_200_steps_with_random_pauses_end_and_all_ranks_of_a_group_make_the_same_calls(sequence: str) -> None:
    check_lists(f"{HUNTED} {sequence} --train-iters 300", 200, 3000.0)
