"""A small model that tensor ranks share, with every way to hold a parameter; written without the layers of tensor_parallel/.

parameter               part of a rank                                          gradient on a holder
embedding, norms, head  all elements                                            whole
up                      rows, and their bias
key                     its group's rows and bias, or some whole groups         partial
gain                    all elements; each rank scales its own channels         partial
down                    columns, and the bias of all of them                    whole (bias)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.divided_state import part_of
from harness.small_engine import VOCAB, Job, ModelShape, Rank, SmallFinal, initial_values
from harness.worlds import run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.parallel.division import Division, Gradient, HeldRange
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec, Use
from megatron_zpp.parallel.stripes import columns_of
from megatron_zpp.zero.pieces import Piece, parameters, resting_pieces

CHANNELS = 2
SHAPE = ModelShape((24, 48))
State = dict[tuple[str, str], Tensor]
History = list[tuple[float, float]]
Stated = tuple[list[Piece], dict[str, tuple[int, ...]]]


class _Copied(torch.autograd.Function):
    """The values; backward adds up the gradients of all tensor ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, link: TensorLink) -> Tensor:
        ctx.link = link
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.link.summed(grad), None


class _Reduced(torch.autograd.Function):
    """The sum over the tensor ranks; each passes on the gradient that it has."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, link: TensorLink) -> Tensor:
        return link.summed(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _across(region: type[torch.autograd.Function], values: Tensor, link: TensorLink | None) -> Tensor:
    if link is None:
        return values
    crossed: Tensor = region.apply(values, link)  # type: ignore[no-untyped-call]
    return crossed


class DividedBlock(nn.Module):
    def __init__(self, hidden: int, inner: int, groups: int, link: TensorLink | None) -> None:
        super().__init__()
        ranks = 1 if link is None else link.ranks
        self.link = link
        self.groups = max(1, groups // ranks)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner // ranks)
        self.key = nn.Linear(hidden, self.groups * CHANNELS)
        self.gain = nn.Parameter(torch.empty(CHANNELS))
        self.unused = nn.Parameter(torch.empty(hidden))
        self.down = nn.Linear(inner // ranks, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = _across(_Copied, self.norm(hidden), self.link)
        inner = F.gelu(self.up(normed)).unflatten(-1, (self.groups, -1, CHANNELS))
        inner = inner * self.key(normed).unflatten(-1, (self.groups, 1, CHANNELS)) * self.gain
        out: Tensor = hidden + _across(_Reduced, F.linear(inner.flatten(-3), self.down.weight), self.link) + self.down.bias
        return out


class DividedModel(nn.Module):
    """Embedding, residual blocks and a tied head, on the meta device."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, groups: int, link: TensorLink | None) -> None:
        super().__init__()
        self.shape, self.groups = shape, groups
        self.ranks, self.rank = (1, 0) if link is None else (link.ranks, link.rank)
        with torch.device("meta"):
            self.embedding = nn.Embedding.from_pretrained(torch.empty(VOCAB, shape.hidden), freeze=False)  # draws no values
            self.blocks = nn.ModuleList(DividedBlock(shape.hidden, inner, groups, link) for inner in shape.inner)
            self.final = SmallFinal(shape)
            self.to(dtype)

    def forward(self, tokens: Tensor, labels: Tensor, uses_spare: bool = False) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.final(hidden, self.embedding.weight, labels)
        return loss

    def unit_specs(self) -> tuple[UnitSpec, ...]:
        paths = {"embedding": "embedding"} | {f"block.{index}": f"blocks.{index}" for index in range(len(self.blocks))}
        return tuple(UnitSpec(unit, tuple(self._params(path))) for unit, path in (paths | {"final_norm": "final.norm"}).items())

    def _params(self, path: str) -> Iterator[ParamSpec]:
        for name, parameter in self.get_submodule(path).named_parameters(prefix=path):
            division = self._division(name, tuple(parameter.shape))
            yield ParamSpec(name, division, partial(part_values, name, division), parameter.ndim > 1)

    def _division(self, name: str, local: tuple[int, ...]) -> Division:
        module, rows = name.split(".")[-2], (local[0] * self.ranks, *local[1:])
        if module == "up" or (module == "key" and self.groups >= self.ranks):
            return Division.evenly(rows, 0, self.ranks, self.rank)
        if module == "key":
            return Division((self.groups * CHANNELS, *local[1:]), 0, tuple(self._group_runs()), self.rank, Gradient.PARTIAL)
        if module == "down" and name.endswith("weight"):
            return Division.evenly((local[0], local[1] * self.ranks), 1, self.ranks, self.rank)
        return Division.undivided(local, self.ranks, self.rank, Gradient.PARTIAL if name.endswith("gain") else Gradient.WHOLE)

    def _group_runs(self) -> Iterator[HeldRange]:
        sharing = self.ranks // self.groups
        for group in range(self.groups):
            yield HeldRange(group * CHANNELS, (group + 1) * CHANNELS, tuple(range(group * sharing, (group + 1) * sharing)))

    def uses(self) -> tuple[Use, ...]:
        blocks = tuple(Use(f"blocks.{index}", (f"block.{index}",), True) for index in range(len(self.blocks)))
        return (Use("embedding", ("embedding",), False), *blocks, Use("final", ("final_norm", "embedding"), True))


def part_values(name: str, division: Division, start: int, stop: int) -> Tensor:
    whole = initial_values(name, division.numel, len(division.shape), 0, division.numel)
    return part_of(whole.view(division.shape), division)[start:stop]


@dataclass
class DividedRank(Rank):
    """One rank that trains the divided model. groups: of channels, each with a key of its own."""

    groups: int = 2

    def _make_model(self, links: Links) -> DividedModel:
        return DividedModel(self.job.shape, self.job.dtype, self.groups, links.tensor_link)

    def _unit_specs(self) -> tuple[UnitSpec, ...]:
        return self.model.unit_specs()  # type: ignore[no-any-return]

    def stated(self) -> Stated:
        """Copies of all states that rest here, and the shapes of whole parameters."""
        return [replace(piece, values=piece.values.clone()) for piece in resting_pieces(self.engine)], self.shapes()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {param.spec.name: param.spec.whole_shape for param in parameters(self.engine)}

    def train_at(self, rate: float) -> History:
        """Loss of this rank and global gradient norm, per step, at another learning rate."""
        history = []
        for step in range(self.job.steps):
            loss = self.accumulate(step)
            history.append((loss, self.engine.step(rate).grad_norm))
        self.engine.close()
        return history


@dataclass(frozen=True)
class Trained:
    """What a run leaves. histories: by rank, loss and gradient norm of each step."""

    histories: list[History]
    state: State


def train_divided(grid: Grid, job: Job, groups: int = 2, rate: float | None = None) -> Trained:
    """A run in which nothing else happens. Fails if an element has not the same bits wherever it rests. rate: of learning."""

    def program(backend: VirtualBackend) -> tuple[History, Stated]:
        rank = DividedRank(job, backend, groups=groups)
        history = rank.train() if rate is None else rank.train_at(rate)
        return history, rank.stated()

    return trained_by(run_world(grid, program))


def trained_by(ranks: Sequence[tuple[History, Stated]]) -> Trained:
    return Trained([history for history, _ in ranks], whole_state((pieces for _, (pieces, _) in ranks), ranks[0][1][1]))


def whole_state(of_ranks: Iterable[Iterable[Piece]], shapes: dict[str, tuple[int, ...]]) -> State:
    """Every state of every whole parameter, put together from what rests on all ranks; equal bits where several have an element."""
    found: State = {}
    known: dict[tuple[str, str], Tensor] = {}
    for pieces in of_ranks:
        for piece in pieces:
            key, shape = (piece.parameter, piece.state), shapes[piece.parameter]
            numel = torch.Size(shape).numel()
            values = found.setdefault(key, torch.zeros(numel, dtype=piece.values.dtype))
            is_known = known.setdefault(key, torch.zeros(numel, dtype=torch.bool))
            first, last = piece.columns or columns_of(shape)
            places = torch.arange(numel).view(-1, columns_of(shape)[1])[:, first:last].flatten()[piece.start : piece.stop]
            again = is_known[places]
            assert torch.equal(bits_of(values[places][again]), bits_of(piece.values[again])), f"{key} has other bits on another rank"
            values[places], is_known[places] = piece.values, torch.ones(places.numel(), dtype=torch.bool)
    assert all(bool(flags.all()) for flags in known.values())
    return {key: values.view(shapes[key[0]]) for key, values in found.items()}


def bits_of(values: Tensor) -> Tensor:
    return values.view({2: torch.int16, 4: torch.int32}[values.itemsize])
