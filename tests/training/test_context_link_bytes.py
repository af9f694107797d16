"""What ranks that divide samples exchange: as many bytes as the closed form and the plan of the run say, the same on every rank."""

from __future__ import annotations

import pytest
from harness.link_bytes import FULL, STEPS, Case, seen_by_ranks
from megatron_zpp.parallel.link_work import LinkWorkOfUses

from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.parallel.grid import Grid

pytestmark = pytest.mark.virtual


PAIR, FOUR, TWO_PAIRS = Grid.of_nodes(1, 2, 1, 2), Grid.of_nodes(1, 4, 1, 4), Grid.of_nodes(1, 4, 1, 2)
BOTH = Grid.of_nodes(1, 4, 2, 2)
CASES = {
    "2 ranks": Case("", PAIR),
    "4 ranks, bf16, 2 micro-batches": Case("--bf16 --global-batch-size 4", FOUR),
    "2 sample groups, rotary, fewer key heads": Case(
        "--position-embedding-type rope --num-query-groups 2 --swiglu", Grid.of_nodes(1, 4, 1, 2)
    ),
    "1 key head, which 4 ranks get": Case("--num-query-groups 1", FOUR),
    "2 nodes": Case("--num-query-groups 2", Grid.of_nodes(2, 2, 1, 4)),
    "selective": Case("--recompute-granularity selective", PAIR),
    "full": Case(f"{FULL} uniform --recompute-num-layers 2", PAIR),
    "some blocks": Case(f"{FULL} block --recompute-num-layers 2 --num-query-groups 1", PAIR),
    "ranks that share layers": Case("--loss-chunk-tokens 3", BOTH),
    "ranks that share layers and tokens, full": Case(f"--sequence-parallel --num-query-groups 1 {FULL} uniform", BOTH),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_and_evaluation_take_the_bytes_of_the_closed_form_and_of_the_plan(case: Case) -> None:
    for seen in seen_by_ranks(case):
        ledger, job = seen.ledger, seen.plan.job
        work, exchanged = job.context_work, ledger.total(Category.EXCHANGES)
        assert exchanged == sum([seen.plan.context_traffic] * STEPS, Traffic()) != Traffic()
        assert exchanged.context_bytes == seen.trained * work.nbytes
        assert ledger.total(Category.EVALUATION).context_bytes == seen.evaluated * LinkWorkOfUses(work.forward).nbytes
        assert ledger.total(Category.ACTIVATIONS).tensor_bytes == seen.trained * job.tensor_work.nbytes
        if case.grid.tensor_ranks == 1:
            assert len(seen.calls) == seen.collectives(work)


def test_between_nodes_go_the_parts_of_the_ranks_that_are_there() -> None:
    """Of 4 ranks on 2 nodes each gets 2 of 3 parts from the other node."""
    for seen in seen_by_ranks(CASES["2 nodes"]):
        exchanged = seen.ledger.total(Category.EXCHANGES)
        assert 3 * exchanged.context_inter_bytes == 2 * exchanged.context_bytes > 0
        assert seen.ledger.context_inter_node_bytes(exchanged) == 2 * exchanged.context_inter_bytes
