"""What a save fetches of differences of weights is booked once."""

from __future__ import annotations

import pytest
import torch
from harness.small_engine import LEARNING_RATE, Job, ModelShape, Rank
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import Code
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import POLICIES, Policy, with_gradients_summed_on_secondary, with_secondary_weights, with_weight_differences

pytestmark = pytest.mark.virtual

DIFFERENCES = Code.gaussian(3, rounds=1)
KEPT = {
    "stage 1": with_weight_differences(POLICIES[1], DIFFERENCES),
    "stage 2, summed": with_gradients_summed_on_secondary(with_weight_differences(POLICIES[2], DIFFERENCES)),
    "stage 3": with_weight_differences(with_secondary_weights(POLICIES[3]), DIFFERENCES),
}


def moved(policy: Policy, *, saves: bool) -> list[list[tuple[int, int]]]:
    """By rank and step: bytes into the node, and from ranks of the own node. saves: after the first step there is a save."""
    job = Job(policy, torch.bfloat16, ModelShape(inner=(40, 90, 90), hidden=24), steps=2, microbatches=3, block_numel=256)

    def program(backend: VirtualBackend) -> list[tuple[int, int]]:
        rank, before, steps = Rank(job, backend), Traffic(), []
        for step in range(job.steps):
            rank.accumulate(step)
            rank.engine.step(LEARNING_RATE)
            total = rank.ledger.total(Category.WEIGHTS, Category.GRADIENTS)
            steps.append((rank.ledger.inter_node_bytes(total - before), (total - before).intra_bytes))
            before = total
            if saves and step == 0:
                rank.engine.finish_differences()
        rank.engine.close()
        return steps

    return run_world(Grid.of_nodes(2, 2), program)


@pytest.mark.parametrize("name", KEPT)
def test_what_a_save_fetches_counts_in_the_step_after_it_which_then_need_not(name: str) -> None:
    assert moved(KEPT[name], saves=True) == moved(KEPT[name], saves=False)
