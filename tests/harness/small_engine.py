"""A small model, its engine and a training loop for one rank of a virtual world, and the same training by plain torch."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.worlds import TurnLanes, run_world
from megatron_zpp.comm.backend import Backend, VirtualBackend
from megatron_zpp.comm.codecs import CodecFactory, make_codec
from megatron_zpp.comm.lanes import Hop
from megatron_zpp.comm.ledger import Category, Ledger, Traffic
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.streams import Streams
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec, Use
from megatron_zpp.parallel.topology import Lane
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.loss_scaler import LossScaler
from megatron_zpp.zero.optimizer_step import StepResult
from megatron_zpp.zero.policy import POLICIES, Policy, Rung
from megatron_zpp.zero.schedule import Prefetch

CPU = torch.device("cpu")
SECONDARY_ROW = Policy(Rung.PRIMARY, Rung.SECONDARY, Rung.SECONDARY)  # a row that no flag offers
ROWS = {**{f"stage {stage}": policy for stage, policy in POLICIES.items()}, "secondary row": SECONDARY_ROW}
VOCAB, TOKENS, GLOBAL_BATCH = 13, 4, 48
LEARNING_RATE, CLIP_GRAD = 1e-2, 0.3


@dataclass(frozen=True)
class ModelShape:
    """inner: the width of each block's inner layer, so that units differ in size. has_spare: a parameter per block that may go unused.

    chunk: blocks that are recomputed together, the last chunk what is left.
    """

    inner: tuple[int, ...] = (17, 40)
    hidden: int = 12
    is_tied: bool = True
    is_recomputed: bool = False
    chunk: int = 1
    has_spare: bool = False


class _Linear(nn.Linear):
    """Draws no values."""

    def reset_parameters(self) -> None:
        pass


class SmallBlock(nn.Module):
    def __init__(self, hidden: int, inner: int, has_spare: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = _Linear(hidden, inner)
        self.down = _Linear(inner, hidden)
        self.spare = nn.Parameter(torch.empty(3, hidden)) if has_spare else None

    def forward(self, hidden: Tensor, uses_spare: bool) -> Tensor:
        if self.spare is not None and uses_spare:
            hidden = hidden + self.spare.sum(0)
        out: Tensor = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        return out


class SmallFinal(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = None if shape.is_tied else _Linear(shape.hidden, VOCAB, bias=False)

    def forward(self, hidden: Tensor, tied_weight: Tensor | None, labels: Tensor) -> Tensor:
        normed = self.norm(hidden)
        logits = F.linear(normed, tied_weight) if self.head is None and tied_weight is not None else self._head(normed)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def _head(self, normed: Tensor) -> Tensor:
        if self.head is None:
            raise RuntimeError("a tied model needs the tied weight")
        logits: Tensor = self.head(normed)
        return logits


class SmallModel(nn.Module):
    """Embedding, residual blocks and a head, tied or not; on the meta device."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.detached_block: int | None = None  # a block whose output gets no gradient
        with torch.device("meta"):
            self.embedding = nn.Embedding.from_pretrained(torch.empty(VOCAB, shape.hidden), freeze=False)  # draws no values
            self.blocks = nn.ModuleList(SmallBlock(shape.hidden, inner, shape.has_spare) for inner in shape.inner)
            self.final = SmallFinal(shape)
            self.to(dtype)

    def forward(self, tokens: Tensor, labels: Tensor, uses_spare: bool = False) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for first in range(0, len(self.blocks), self.shape.chunk):
            chunk = range(first, min(first + self.shape.chunk, len(self.blocks)))
            if self.shape.is_recomputed:
                hidden = cast(Tensor, checkpoint(self._through, chunk, hidden, uses_spare, use_reentrant=False))
            else:
                hidden = self._through(chunk, hidden, uses_spare)
        loss: Tensor = self.final(hidden, self.embedding.weight if self.shape.is_tied else None, labels)
        return loss

    def _through(self, chunk: range, hidden: Tensor, uses_spare: bool) -> Tensor:
        for index in chunk:
            before, hidden = hidden, self.blocks[index](hidden, uses_spare)
            if index == self.detached_block:
                hidden = before + hidden.detach()
        return hidden

    def unit_specs(self) -> tuple[UnitSpec, ...]:
        paths = {"embedding": "embedding"} | {f"block.{index}": f"blocks.{index}" for index in range(len(self.blocks))}
        paths["final_norm"] = "final.norm"
        if not self.shape.is_tied:
            paths["head"] = "final.head"
        return tuple(UnitSpec(unit, self._params(path)) for unit, path in paths.items())

    def _params(self, path: str) -> tuple[ParamSpec, ...]:
        return tuple(
            ParamSpec(
                name,
                Division.undivided(tuple(parameter.shape)),
                partial(initial_values, name, parameter.numel(), parameter.ndim),
                parameter.ndim > 1,
            )
            for name, parameter in self.get_submodule(path).named_parameters(prefix=path)
        )

    def uses(self) -> tuple[Use, ...]:
        chunk_of = [index // self.shape.chunk if self.shape.is_recomputed else None for index in range(len(self.blocks))]
        blocks = tuple(Use(f"blocks.{index}", (f"block.{index}",), True, chunk) for index, chunk in enumerate(chunk_of))
        output = "embedding" if self.shape.is_tied else "head"
        return (Use("embedding", ("embedding",), False), *blocks, Use("final", ("final_norm", output), True))


def _held_by_all(param: ParamSpec, tensor_ranks: int, tensor_rank: int) -> ParamSpec:
    return replace(param, division=Division.undivided(param.shape, tensor_ranks, tensor_rank))


def _held_by_one(param: ParamSpec, tensor_ranks: int, tensor_rank: int) -> ParamSpec:
    whole_shape = (tensor_ranks * param.shape[0], *param.shape[1:])
    return replace(param, division=Division.evenly(whole_shape, 0, tensor_ranks, tensor_rank))


def held_specs(specs: tuple[UnitSpec, ...], grid: Grid, rank: int, *, shares: bool = True) -> tuple[UnitSpec, ...]:
    """The units that a rank holds: of ladders beside each other all hold the same elements, or each has its own."""
    if grid.tensor_ranks == 1:
        return specs
    held, tensor_rank = _held_by_all if shares else _held_by_one, grid.tensor_rank_of(rank)
    return tuple(replace(unit, params=tuple(held(param, grid.tensor_ranks, tensor_rank) for param in unit.params)) for unit in specs)


def initial_values(name: str, numel: int, ndim: int, start: int, stop: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(numel, generator=generator) * (0.4 if ndim > 1 else 0.1)
    return (values + (1.0 if name.endswith("norm.weight") else 0.0))[start:stop]


@dataclass(frozen=True)
class Job:
    """A run of a few steps on a fixed global batch."""

    policy: Policy = POLICIES[3]
    dtype: torch.dtype = torch.float32
    shape: ModelShape = ModelShape()
    steps: int = 3
    microbatches: int = 1
    prefetch: Prefetch = Prefetch()
    block_numel: int = 32
    clip_grad: float = CLIP_GRAD
    loss_scaler: Callable[[], LossScaler] | None = None
    full_precision_iterations: int = 0
    adam: AdamOptions = AdamOptions()
    make_codec: CodecFactory = make_codec
    counts_zeros: bool = False

    def options(self) -> EngineOptions:
        return EngineOptions(
            self.policy,
            self.dtype,
            self.block_numel,
            self.prefetch,
            self.adam,
            self.clip_grad,
            self.full_precision_iterations,
            counts_zeros=self.counts_zeros,
            make_codec=self.make_codec,
        )


class RecordingLanes(TurnLanes):
    """Lanes that remember every submission."""

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        super().__init__(pause)
        self.submissions: list[tuple[str, Lane]] = []

    def submit(self, hop: Hop) -> None:
        self.submissions.append((hop.name, hop.lane))
        super().submit(hop)


def random_pauses(seed: int) -> Callable[[], None]:
    generator = random.Random(seed)
    return lambda: time.sleep(generator.choice([0.0, 0.0, 0.0005, 0.002]))


@dataclass
class Rank:
    """One rank that trains. Ladders beside each other hold the same model and get the same batches; the first counts in norms.

    shares: without it, every ladder has elements of its own, and counts them.
    """

    job: Job
    backend: Backend
    lanes: Any = field(default_factory=RecordingLanes)
    uses_spare: bool = False
    shares: bool = True
    streams: Streams | None = None

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.backend.grid, self.backend.rank)
        links = Links(self.backend, self.lanes, self.ledger, CPU, self.streams)
        self.model = self._make_model(links)
        scaler = self.job.loss_scaler() if self.job.loss_scaler else None
        self.engine = ZeroEngine(self.model, self._unit_specs(), self.model.uses(), self.job.options(), links, scaler)

    def _make_model(self, links: Links) -> Any:
        return SmallModel(self.job.shape, self.job.dtype)

    def _unit_specs(self) -> tuple[UnitSpec, ...]:
        return held_specs(self.model.unit_specs(), self.backend.grid, self.backend.rank, shares=self.shares)

    def loss(self, step: int, microbatch: int = 0) -> Tensor:
        tokens, labels = self.batch(step, microbatch)
        loss: Tensor = self.model(tokens, labels, self.uses_spare)
        return loss

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        grid = self.backend.grid
        samples = max(1, GLOBAL_BATCH // (grid.data_ranks * self.job.microbatches))
        first = (microbatch * grid.data_ranks + grid.data_rank_of(self.backend.rank)) * samples
        tokens, labels = global_batch(step)
        rows = [row % GLOBAL_BATCH for row in range(first, first + samples)]
        return tokens[rows], labels[rows]

    def backward(self, loss: Tensor, microbatch: int = 0) -> None:
        count = self.job.microbatches
        self.engine.backward(loss, microbatches=count, is_last_microbatch=microbatch == count - 1)

    def accumulate(self, step: int) -> float:
        """The mean loss of this rank's micro-batches, whose gradients are on their way."""
        total = 0.0
        for microbatch in range(self.job.microbatches):
            loss = self.loss(step, microbatch)
            self.backward(loss, microbatch)
            total += loss.item()
        return total / self.job.microbatches

    def step(self, step: int) -> tuple[float, StepResult]:
        loss = self.accumulate(step)
        return loss, self.engine.step(LEARNING_RATE)

    def train(self) -> list[tuple[float, float]]:
        """Loss of this rank and global gradient norm, per step."""
        history = []
        for step in range(self.job.steps):
            loss, result = self.step(step)
            history.append((loss, result.grad_norm))
        self.engine.close()
        return history

    def own_main_weights(self) -> dict[str, list[tuple[int, Tensor]]]:
        """By parameter the (start, values) of the slice that this rank owns."""
        pieces: dict[str, list[tuple[int, Tensor]]] = {}
        for unit in self.engine.units:
            for segment in unit.layout.segments(unit.first_slice, unit.slices):
                values = unit.main_weight[segment.offset : segment.offset + segment.stop - segment.start].clone()
                pieces.setdefault(segment.spec.name, []).append((segment.start, values))
        return pieces


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(VOCAB, (GLOBAL_BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1000 + step))
    return text[:, :-1], text[:, 1:]


@cache
def train_world(shape: tuple[int, int] | Grid, job: Job) -> list[list[tuple[float, float]]]:
    """The history of every rank of a run in which nothing else happens, made once per job."""
    return run_world(shape, lambda backend: Rank(job, backend).train())


def bytes_by_step(shape: tuple[int, int] | Grid, job: Job, evaluations: int = 0) -> list[list[tuple[int, int]]]:
    """By rank and step: bytes entering its node, and bytes from ranks of its own node.

    evaluations: after every step, of which the bytes do not count.
    """

    def program(backend: VirtualBackend) -> list[tuple[int, int]]:
        rank = Rank(job, backend)
        before, steps = Traffic(), []
        for step in range(job.steps):
            rank.step(step)
            total = rank.ledger.total(Category.WEIGHTS, Category.GRADIENTS)
            steps.append((rank.ledger.inter_node_bytes(total - before), (total - before).intra_bytes))
            before = total
            with torch.no_grad():
                for _ in range(evaluations):
                    rank.loss(50)
        rank.engine.close()
        return steps

    return run_world(shape, program)


def mean_losses(histories: list[list[tuple[float, float]]]) -> list[float]:
    """The loss of the global batch, per step."""
    return [sum(loss for loss, _ in of_ranks) / len(of_ranks) for of_ranks in zip(*histories, strict=True)]


def plain_model(shape: ModelShape, dtype: torch.dtype = torch.float32) -> SmallModel:
    """The same model with the same first weights, as real parameters."""
    model = SmallModel(shape, dtype).to_empty(device=CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_values(name, parameter.numel(), parameter.ndim, 0, parameter.numel()).view(parameter.shape))
    return model


def train_plainly(job: Job) -> tuple[list[tuple[float, float]], SmallModel]:
    """Loss and gradient norm per step of torch's own loop over the whole global batch in fp32, and the model at its end."""
    return _train_plainly(job.shape, job.steps, job.clip_grad)


@cache
def _train_plainly(shape: ModelShape, steps: int, clip_grad: float) -> tuple[list[tuple[float, float]], SmallModel]:
    model = plain_model(shape)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    adam = AdamOptions()
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": adam.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(adam.beta1, adam.beta2), eps=adam.eps)
    history = []
    for step in range(steps):
        loss = model(*global_batch(step))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history, model
