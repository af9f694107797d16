"""Any module through shard() on streams of the model machine: no access without an order, the same bits, and an end that waits."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.fake_streams.own_links import links_on_machines, put_rank_on
from harness.worlds import run_world
from torch import Tensor, nn

from megatron_zpp.comm.backend import Backend
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES, ZEROPP, Policy, with_offloaded_optimizer
from megatron_zpp.zero.shard import full_weights, shard

pytestmark = pytest.mark.virtual

UNITS = ["first", "middle", "last"]
History = tuple[list[float], dict[str, list[float]]]


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, values: Tensor, leaves_out: bool) -> Tensor:
        hidden = self.first(values).tanh()
        hidden = hidden if leaves_out else self.middle(hidden).tanh()
        output: Tensor = self.last(hidden)
        return output


with torch.random.fork_rng():
    torch.manual_seed(3)
    MODULE = Module()


@pytest.fixture(autouse=True)
def streams_by_rank() -> Iterator[None]:
    with links_on_machines():
        yield


def train(policy: Policy, backend: Backend, gpu: Gpu | None = None) -> History:
    """Norms and last weights of two steps of two micro-batches; half of the ranks leave a unit out, and all evaluate."""
    put_rank_on(None if gpu is None else gpu.machine)
    module = copy.deepcopy(MODULE)
    engine = shard(module, UNITS, EngineOptions(policy=policy, block_numel=32), backend=backend)
    norms = []
    for step in range(2):
        for microbatch in range(2):
            values = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + microbatch + backend.rank))
            loss = module(values, leaves_out=(backend.rank + step) % 2 == 0).square().mean()
            engine.backward(loss, microbatches=2, is_last_microbatch=microbatch == 1)
        norms.append(engine.step(1e-2).grad_norm)
        with torch.no_grad():
            module(values, leaves_out=False)
    weights = {path: values.flatten().tolist() for path, values in full_weights(engine)}
    engine.close()
    return norms, weights


@pytest.mark.parametrize(
    "policy", [POLICIES[3], ZEROPP, with_offloaded_optimizer(POLICIES[2])], ids=["stage 3", "ZeRO++", "offloaded stage 2"]
)
def test_no_access_lacks_an_order_the_bits_are_those_of_threads_and_groups_end_when_all_ranks_have_done(policy: Policy) -> None:
    assert run_on_gpus((2, 2), lambda gpu: train(policy, gpu.backend, gpu)) == run_world((2, 2), lambda backend: train(policy, backend))
