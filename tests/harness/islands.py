"""Islands of a virtual world that train the same module by themselves, joined by outer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from harness.worlds import run_world
from megatron_zpp.comm import world_links
from megatron_zpp.comm.backend import Backend, VirtualBackend
from megatron_zpp.comm.lanes import ThreadLanes
from megatron_zpp.outer.join import join_islands
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.loss_scaler import LossScaler
from megatron_zpp.zero.shard import full_weights, shard

Result = TypeVar("Result")
WIDTH, INNERS, RATE = 24, (40, 100, 40), 1e-2
UNITS = [str(index) for index in range(len(INNERS) + 1)]


def small_module() -> nn.Sequential:
    """Units of different sizes, with gains and biases, and parameters that fill no whole blocks."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH)) for inner in INNERS]
        return nn.Sequential(*blocks, nn.LayerNorm(WIDTH))


@dataclass
class Member:
    """One rank: the engine of its island, and its outer steps."""

    engine: ZeroEngine
    outer: OuterSteps

    def train(self, step: int, *, stream: int | None = None, spoils: bool = False) -> float:
        """One inner step, and its loss. stream: which samples; by default those of this rank alone. spoils: whether gradients are NaN."""
        inputs = samples(step, self.outer.data_rank if stream is None else stream).to(self.engine.options.dtype)
        loss = loss_of(self.engine.module, inputs)
        self.engine.backward(loss * (torch.nan if spoils else 1.0))
        self.engine.step(RATE)
        return loss.item()

    def weights(self) -> Tensor:
        """All main weights of the island, in one row."""
        return torch.cat([weight.flatten() for _, weight in full_weights(self.engine)])


def weights_of(module: nn.Sequential) -> Tensor:
    """The parameters in one row, in the order that Member.weights has: of each unit matrices first."""
    parameters = [sorted(child.parameters(), key=lambda parameter: parameter.ndim < 2) for child in module]
    return torch.cat([parameter.detach().flatten() for of_child in parameters for parameter in of_child])


def samples(step: int, stream: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + stream))


def loss_of(module: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = (module(inputs) - inputs.roll(1, dims=1)).float().square().mean()
    return loss


def join(
    module: nn.Sequential,
    island: Backend,
    column: Backend,
    engine_options: EngineOptions,
    options: OuterOptions,
    loss_scaler: LossScaler | None = None,
) -> Member:
    """A rank with these backends: of its island, and to the ranks at its place on the others."""
    units = [name for name, _ in module.named_children()]
    engine = shard(copy.deepcopy(module), units, engine_options, loss_scaler=loss_scaler, backend=island)
    return Member(engine, join_islands(engine, options, backend=column))


def run_islands(
    islands: int,
    ranks: int,
    program: Callable[[Member], Result],
    engine_options: EngineOptions = EngineOptions(),
    options: OuterOptions = OuterOptions(),
    *,
    module: nn.Sequential | None = None,
    pause: Callable[[], None] | None = None,
    loss_scaler: Callable[[], LossScaler] | None = None,
) -> list[Result]:
    """What `program` returns on each rank, island after island. pause: before each hop is prepared; then all ranks run at once."""
    model = module or small_module()

    def run(backend: VirtualBackend) -> Result:
        member = join(model, *backend.on_islands(islands), engine_options, options, loss_scaler and loss_scaler())
        result = program(member)
        member.outer.close()
        member.engine.close()
        return result

    if pause is None:
        return run_world((islands, ranks), run)
    with patch.object(world_links, "make_lanes", lambda _: ThreadLanes(pause)):
        return run_world((islands, ranks), run, takes_turns=False)
