"""A GPT that tensor ranks share, in 16 bits and with other prefetches: the same bits at every stage. See tests/zero/test_divided_gpt.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness.divided_gpt import GptRank
from harness.small_engine import Job
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import POLICIES, Policy, with_secondary_weights
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

ROWS = {"stage 0": POLICIES[0], "stage 2": POLICIES[2], "stage 3": POLICIES[3], "hpZ": with_secondary_weights(POLICIES[3])}


def histories(
    model: str, sequence_parallel: bool, *, policy: Policy, prefetch: Prefetch = Prefetch(), **changes: Any
) -> list[list[tuple[float, float]]]:
    """The loss and the gradient norm of each step, on each rank."""

    def on_rank(backend: VirtualBackend) -> list[tuple[float, float]]:
        job = Job(policy, torch.bfloat16, prefetch=prefetch, steps=4)
        return GptRank(job, backend, gpt=model, sequence_parallel=sequence_parallel, changes=changes | {"hidden_dropout": 0.1}).train()

    return run_world(Grid.of_nodes(1, 4, 2), on_rank)


@pytest.mark.parametrize(("model", "sequence_parallel"), [("GPT-2", True), ("Qwen3, tied", False)], ids=str)
def test_in_16_bits_the_bits_depend_on_neither_stage_nor_prefetch_nor_recomputation(model: str, sequence_parallel: bool) -> None:
    run = partial(histories, model, sequence_parallel)
    expected = run(policy=ROWS["stage 0"])
    assert run(policy=ROWS["stage 2"], recompute_granularity="selective") == expected
    assert run(policy=ROWS["stage 3"], recompute_granularity="full", prefetch=Prefetch(0, 0)) == expected
    assert run(policy=ROWS["hpZ"], recompute_granularity="full", recompute_num_layers=2, prefetch=Prefetch(3, 2)) == expected
