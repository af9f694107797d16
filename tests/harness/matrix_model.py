"""A model of matrices alone, whose units need no padding, have no exact values and all climb twice per micro-batch in stage 3."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.small_engine import CPU, initial_values
from harness.worlds import TurnLanes
from megatron_zpp.comm.backend import Backend
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec, Use
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import Policy

WIDTH, LAYERS = 128, 3
PARAMETERS = (LAYERS + 1) * WIDTH**2  # each matrix makes 16 blocks of 256 values for each of 4 ranks: scales of 2 or 4 bytes fill 16 bytes
BLOCK = 256
WORLD = (2, 2)


class _Output(nn.Module):
    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.linear(hidden, weight).float().square().mean()


class MatrixModel(nn.Module):
    """A tied embedding and square layers, on the meta device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embedding = nn.Embedding.from_pretrained(torch.empty(WIDTH, WIDTH, dtype=dtype), freeze=False)  # draws no values
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS))
        self.output = _Output()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) / WIDTH
        loss: Tensor = self.output(hidden, self.embedding.weight)
        return loss

    def unit_specs(self) -> tuple[UnitSpec, ...]:
        paths = ["embedding", *(f"layers.{index}" for index in range(LAYERS))]
        return tuple(UnitSpec(path, (self._param(f"{path}.weight"),)) for path in paths)

    def _param(self, name: str) -> ParamSpec:
        return ParamSpec(name, Division.undivided((WIDTH, WIDTH)), partial(initial_values, name, WIDTH * WIDTH, 2), True)

    def uses(self) -> tuple[Use, ...]:
        layers = tuple(Use(f"layers.{index}", (f"layers.{index}",), True) for index in range(LAYERS))
        return (Use("embedding", ("embedding",), False), *layers, Use("output", ("embedding",), True))


class MatrixRank:
    """One rank that trains the model in bf16."""

    def __init__(self, policy: Policy, backend: Backend) -> None:
        self.model = MatrixModel(torch.bfloat16)
        self.ledger = Ledger(backend.grid, backend.rank)
        options = EngineOptions(policy, torch.bfloat16, BLOCK)
        links = Links(backend, TurnLanes(), self.ledger, CPU)
        self.engine = ZeroEngine(self.model, self.model.unit_specs(), self.model.uses(), options, links)

    def accumulate(self, microbatches: int) -> None:
        for microbatch in range(microbatches):
            loss = self.model(torch.arange(8) + microbatch)
            self.engine.backward(loss, microbatches=microbatches, is_last_microbatch=microbatch == microbatches - 1)
