"""Outer steps on the streams of a GPU."""

from __future__ import annotations

import pytest
import torch
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.fake_streams.nccl import FakeNccl
from harness.fake_streams.own_links import links_on_machines, put_rank_on
from harness.islands import Member, join, loss_of, run_islands, samples, small_module
from torch import Tensor

from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES, Policy

pytestmark = pytest.mark.virtual


def train(member: Member) -> tuple[list[float], list[float], Tensor]:
    """Losses of training, those of evaluations, and the weights at the end."""
    losses, seen = [], []
    for step in range(5):
        losses.append(member.train(step))
        member.outer.step()
        if step % 2:
            with member.outer.outer_weights(), torch.no_grad():
                seen.append(loss_of(member.engine.module, samples(99, 0)).item())
    return losses, seen, member.weights()


@pytest.mark.parametrize("policy", [POLICIES[3], POLICIES[1]], ids=["stage 3", "stage 1"])
def test_no_access_lacks_an_order_and_the_bits_are_those_of_threads(policy: Policy) -> None:
    module, options = small_module(), OuterOptions(2)

    def on_gpu(gpu: Gpu) -> tuple[list[float], list[float], Tensor]:
        put_rank_on(gpu.machine)
        of_island, of_column = (FakeNccl(part, gpu.accesses) for part in gpu.backend.backend.on_islands(2))
        member = join(module, of_island, of_column, EngineOptions(policy), options)
        result = train(member)
        member.outer.close()
        member.engine.close()
        return result

    with links_on_machines():
        found = run_on_gpus((2, 2), on_gpu)
    for (losses, seen, weights), expected in zip(found, run_islands(2, 2, train, EngineOptions(policy), options), strict=True):
        assert (losses, seen) == expected[:2]
        assert torch.equal(weights, expected[2])
