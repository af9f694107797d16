"""A chain of equal uses that take a known time: 1 in forward, 2 in backward."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from harness.fake_streams.gpus import Gpu
from harness.small_engine import CPU, initial_values
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec, Use
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.optimizer import ShardedAdamW, Update
from megatron_zpp.zero.policy import Rung

WIDTH = 16
FORWARD, BACKWARD = 1.0, 2.0


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gpu: Gpu) -> Tensor:
        ctx.gpu = gpu
        gpu.machine.spend(FORWARD)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.gpu.machine.spend(BACKWARD)
        return gradients[0].clone(), None


class TimedUse(nn.Module):
    """One use. What it computes does not matter, but it reads its weight in forward and in backward."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")
        self.gpu = gpu

    def forward(self, values: Tensor) -> Tensor:
        return cast(Tensor, self.linear(_Timed.apply(values, self.gpu)))  # type: ignore[no-untyped-call]


def step_time(gpu: Gpu, options: EngineOptions, *, uses: int, microbatches: int, steps: int = 3, update: float = 0.0) -> float:
    """The time of the last of `steps` steps, once the pool of buffers does not grow any more.

    update: the time of updating all units but those that the next step needs first; if the optimizer is on the host, of every unit.
    Nothing else of the optimizer takes time.
    """
    model = nn.Sequential(*[TimedUse(gpu) for _ in range(uses)])
    division, values = Division.undivided((WIDTH, WIDTH)), partial(initial_values, "w", WIDTH**2, 2)
    specs = [UnitSpec(f"unit {use}", (ParamSpec(f"{use}.linear.weight", division, values, True),)) for use in range(uses)]
    links = Links(gpu.backend, gpu.lanes, Ledger(gpu.backend.grid, gpu.backend.rank), CPU, gpu.machine)
    engine = ZeroEngine(model, specs, [Use(str(use), (f"unit {use}",), True) for use in range(uses)], options, links)
    _take_time(gpu, engine.optimizer, update, on_host=options.policy.optimizer is Rung.HOST)
    begin = 0.0
    for _ in range(steps):
        begin = gpu.machine.compute.free_at
        for microbatch in range(microbatches):
            inputs = torch.ones(2, WIDTH, requires_grad=True)
            engine.backward(model(inputs).sum(), microbatches=microbatches, is_last_microbatch=microbatch == microbatches - 1)
        engine.step(1e-3)
    end = gpu.machine.compute.free_at
    engine.close()
    return end - begin


def _take_time(gpu: Gpu, optimizer: ShardedAdamW, seconds: float, *, on_host: bool) -> None:
    update_group = optimizer.update

    def update(group: int, step: Update) -> None:
        update_group(group, step)
        if on_host:
            gpu.machine.host_time += seconds
        elif group > 0:
            gpu.machine.spend(seconds)

    optimizer.update = update  # type: ignore[method-assign]
