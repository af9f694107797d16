"""Trains one setting with one seed: the ranks of a virtual world, each with the engine of this repository."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks.loss_study.settings import Setting
from benchmarks.loss_study.text import VOCABULARY, Text, mean_loss
from benchmarks.loss_study.turns import InlineLanes, TurnWorld
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Category, Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.training.lr_schedule import LearningRateSchedule
from megatron_zpp.training.setup import working_dtype
from megatron_zpp.training.sharding import choose_policy, grid_of
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions

NODES, RANKS_PER_NODE = 2, 2
CPU = torch.device("cpu")
SEQ_LENGTH = 128
# Rotary positions and initial weights that suit this width: otherwise most of a short run passes before context is of use, and when it
# becomes so is chance.
MODEL = (
    "--num-layers 2 --hidden-size {width} --num-attention-heads 4 "
    f"--seq-length {SEQ_LENGTH} --position-embedding-type rope "
    "--init-method-std {std} --attention-dropout 0 --hidden-dropout 0"
)
OPTIMIZER = "--lr {rate} --min-lr {least} --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0"
NARROW = MODEL.format(width=96, std="0.1")
WIDE = MODEL.format(width=256, std="0.0625")
# By name, the flags of the model and those of the optimizer. In the wide one a block of 256 values lies in one row of a matrix, as in large
# models; in the narrow one it spans three rows. Those of islands have more samples in a step, because each node trains on its own half.
MODELS = {
    "narrow": (NARROW, OPTIMIZER.format(rate="4e-3", least="4e-4")),
    "islands": (NARROW, OPTIMIZER.format(rate="4e-3", least="4e-4")),
    "wide": (WIDE, OPTIMIZER.format(rate="0.0015", least="0.00015")),
    "islands-wide": (WIDE, OPTIMIZER.format(rate="0.0015", least="0.00015")),
}
SAMPLES = {"narrow": 8, "wide": 8, "islands": 32, "islands-wide": 64}  # of a step, over all ranks
BATCH = "--micro-batch-size {own} --global-batch-size {whole}"
DATA = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --num-workers 0"
SHARDING = f"--zero-stage 3 --ranks-per-node {RANKS_PER_NODE}"
HELD_OUT_SAMPLES = 512
EVALUATED_TOGETHER = 32
LOSSES_TOGETHER = 10  # training losses of which one mean is stored


def common_flags(train_iters: int, model: str) -> str:
    """The flags that all settings share. model: a name of MODELS."""
    shape, optimizer = MODELS[model]
    length = f"--train-iters {train_iters} --lr-decay-iters {train_iters} --lr-warmup-iters {train_iters // 10} --eval-iters 0"
    batch = BATCH.format(own=SAMPLES[model] // (NODES * RANKS_PER_NODE), whole=SAMPLES[model])
    return " ".join([shape, batch, optimizer, DATA, SHARDING, length, "--bf16"])


@dataclass(frozen=True)
class Outcome:
    """One run. Losses are nats per byte of text; inter_node_bytes enter a node in a step.

    validation_loss: with the weights that the engine trains with. exported_loss: with the fp32 main weights, as an export has them.
    training_losses: means of 10 steps each. cpu_seconds: of the whole process.
    """

    setting: str
    seed: int
    validation_loss: float
    exported_loss: float
    training_losses: list[float]
    inter_node_bytes: float
    cpu_seconds: float


@dataclass
class _OfRank:
    """What one rank brings back. main_weights: by parameter, the (start, values) of the slices that it owns."""

    losses: list[float] = field(default_factory=list)
    held_out_loss: float = 0.0
    inter_node_bytes: float = 0.0
    main_weights: list[tuple[str, int, Tensor]] = field(default_factory=list)


def trained(setting: Setting, seed: int, train_iters: int, text: Text, model: str) -> Outcome:
    start = time.process_time()
    flags = f"{common_flags(train_iters, model)} --seed {seed} {setting.flags}"
    config = resolve(parse_flags(shlex.split(flags)), NODES * RANKS_PER_NODE, RANKS_PER_NODE)
    ranks: list[_OfRank] = TurnWorld(grid_of(config, NODES * RANKS_PER_NODE)).run(
        lambda backend: _Rank(setting, config, text, backend).train(train_iters)
    )
    losses = [statistics.mean(of_ranks) for of_ranks in zip(*(rank.losses for rank in ranks), strict=True)]
    return Outcome(
        setting=setting.name,
        seed=seed,
        validation_loss=statistics.mean(rank.held_out_loss for rank in ranks),
        exported_loss=_exported_loss(config, text, ranks),
        training_losses=[statistics.mean(losses[first : first + LOSSES_TOGETHER]) for first in range(0, len(losses), LOSSES_TOGETHER)],
        inter_node_bytes=ranks[0].inter_node_bytes,
        cpu_seconds=time.process_time() - start,
    )


class _Rank:
    def __init__(self, setting: Setting, config: Config, text: Text, backend: VirtualBackend) -> None:
        self._config = config
        self._text = text
        self._schedule = LearningRateSchedule.from_config(config.optimizer, config.training, config.sample_lengths)
        self._rate_factor = setting.rate_factor * (1.0 + setting.perturbation)
        self._averages_moments = setting.averages_moments
        self._samples = config.training.global_batch_size
        self._rank, self._ranks = backend.rank, backend.grid.world_size
        island, column = backend.on_islands(NODES)
        own = backend if setting.outer is None else island
        dtype = working_dtype(config.precision)
        self._model = GPT(config.model, VOCABULARY, config.training.seed, dtype)
        self._ledger = Ledger(own.grid, own.rank)
        links = Links(own, InlineLanes(), self._ledger, CPU)
        optimizer = config.optimizer
        options = EngineOptions(
            policy=setting.change(choose_policy(config.zero)),
            dtype=dtype,
            block_numel=config.zero.quantization_block_size,
            adam=AdamOptions(optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps, optimizer.weight_decay),
            clip_grad=optimizer.clip_grad,
            noise_seed=config.training.seed,
            make_codec=setting.make_codec,
        )
        self._engine = ZeroEngine(self._model, self._model.unit_specs(), self._model.uses(), options, links)
        self._outer = None if setting.outer is None else self._join(setting.outer, column)

    def _join(self, options: OuterOptions, column: VirtualBackend) -> OuterSteps:
        links = Links(column, InlineLanes(), Ledger(column.grid, column.rank), CPU)
        warm_up = self._config.optimizer.lr_warmup_iters
        return OuterSteps(self._engine, links, replace(options, start_iteration=warm_up))

    def train(self, train_iters: int) -> _OfRank:
        result = _OfRank()
        first = 1 if self._outer is None else self._outer.options.start_iteration
        for step in range(train_iters):
            if step == first:
                first_bytes = self._node_bytes()  # without those of a kept copy's first version, or of the means of a warm-up
            result.losses.append(self._step(step))
        result.inter_node_bytes = (self._node_bytes() - first_bytes) / (train_iters - first)
        if self._outer is not None:
            self._outer.take_means()
        with self._outer.outer_weights() if self._outer is not None else nullcontext():
            result.held_out_loss = self._held_out_loss()
            result.main_weights = list(self._own_main_weights())
        self._engine.close()
        return result

    def _step(self, step: int) -> float:
        tokens, labels = self._text.training_batch(self._config.training.seed, step, self._samples)
        loss = self._model(tokens[self._own_rows(tokens)], labels[self._own_rows(labels)], first_sample=0).mean()
        self._engine.backward(loss)
        rate = self._schedule.learning_rate(step * self._samples)
        result = self._engine.step(rate * self._rate_factor)
        if result.is_skipped:
            raise RuntimeError(f"step {step} was skipped, because its gradient has a NaN or inf")
        if self._outer is not None:
            self._outer.step()
            if self._averages_moments:
                _average_moments(self._outer)
        return float(loss.detach())

    def _node_bytes(self) -> int:
        return self._ledger.inter_node_bytes(self._ledger.total(Category.WEIGHTS, Category.GRADIENTS, Category.OUTER))

    def _held_out_loss(self) -> float:
        """The mean loss of this rank's share of the held-out samples; all shares are equal."""
        tokens, labels = self._text.held_out()
        return mean_loss(self._model, tokens[self._own_rows(tokens)], labels[self._own_rows(labels)], EVALUATED_TOGETHER)

    def _own_rows(self, rows: Tensor) -> slice:
        share = len(rows) // self._ranks
        return slice(self._rank * share, (self._rank + 1) * share)

    def _own_main_weights(self) -> Iterator[tuple[str, int, Tensor]]:
        for unit in self._engine.units:
            for segment in unit.layout.segments(unit.first_slice, unit.slices):
                stop = segment.offset + segment.stop - segment.start
                yield segment.spec.name, segment.start, unit.main_weight[segment.offset : stop].clone()


def _average_moments(outer: OuterSteps) -> None:
    """Gives all islands the mean of the moments of the units that are due, exactly."""
    moments = outer.engine.optimizer.moments
    for index in outer.due:
        for values in moments[index].values():
            values.copy_(outer.links.backend.gather_world(values.clone())[:, 0].mean(dim=0))


@torch.no_grad()
def _exported_loss(config: Config, text: Text, ranks: list[_OfRank]) -> float:
    model = materialize(GPT(config.model, VOCABULARY, config.training.seed, torch.float32))
    for rank in ranks:
        for name, first, values in rank.main_weights:
            model.get_parameter(name).view(-1)[first : first + len(values)] = values
    return mean_loss(model, *text.held_out(), EVALUATED_TOGETHER)
