"""Trains one configuration of this repository in a rank; the engine is built from flags as in the training script."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

from torch import Tensor

from benchmarks.loss_study.text import mean_loss
from benchmarks.slow_links.batches import Batches, microbatches, same_batches
from benchmarks.slow_links.stopwatch import StopwatchLanes
from megatron_zpp.comm.ledger import Category
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.parallel.initialize import World
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.training import setup
from megatron_zpp.training.instruments import make_instruments
from megatron_zpp.training.kernels import prepare_kernels
from megatron_zpp.training.lr_schedule import LearningRateSchedule
from megatron_zpp.training.step import forward_backward, row_of

PROMISED = (Category.WEIGHTS, Category.GRADIENTS, Category.OUTER)
EVALUATED_TOGETHER = 8


class Training(Protocol):
    """A training that a rank can run; every rank must make the same calls."""

    def step(self) -> float: ...

    def drain(self) -> None: ...

    def node_bytes(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Learner(Training, Protocol):
    """A training whose weights can be evaluated."""

    def mean_loss(self, tokens: Tensor, labels: Tensor) -> float: ...


class OurTraining:
    """A model and its engine; every rank must make the same calls."""

    def __init__(self, flags: Sequence[str], launch: Launch, world: World, batches: Batches = same_batches) -> None:
        config = resolve(parse_flags(flags), launch.world_size, launch.local_world_size)
        instruments = make_instruments(config, world.device, launch.rank)
        self._links = setup.build_links(config, world, instruments)
        self.lanes = StopwatchLanes(self._links.lanes)
        self._links.lanes = self.lanes
        column = setup.build_column(config, world, instruments)
        prepare_kernels(config, world, world.hosts())
        padded_vocab = setup.build_vocabulary(config).padded_size
        self._model = setup.build_model(config, padded_vocab, None, self._links)
        self._engine = setup.build_engine(config, self._model, self._links, instruments)
        self._outer = setup.build_outer(config, self._engine, column)
        self._all_links = [self._links] if column is None else [self._links, column]
        place = self._engine if self._outer is None else self._outer
        self._batches = batches(config, range(place.data_rank, launch.world_size, place.data_ranks))
        self._microbatches = microbatches(config, place.data_ranks)
        self._rates = LearningRates(config)
        self._weight_decay = config.optimizer.weight_decay

    def step(self) -> float:
        """The loss of one training step; of islands, that of the own one."""
        loss_sum = forward_backward(self._model, self._engine, self._batches, self._microbatches)
        update = self._engine.update(self._rates.next(), self._weight_decay, row_of([loss_sum], self._engine.device))
        if self._outer is not None:
            self._outer.step()
        loss_sums = update.report[:: self._engine.links.grid.tensor_ranks]
        return sum(loss_sums) / (self._microbatches * len(loss_sums))

    def drain(self) -> None:
        """Returns once the climbs that a step submits for the next one have landed too."""
        for links in self._all_links:
            links.lanes.drain()

    def mean_loss(self, tokens: Tensor, labels: Tensor) -> float:
        """The mean loss of samples [samples, length]; of islands, with the weights that all share."""
        with nullcontext() if self._outer is None else self._outer.outer_weights():
            return mean_loss(self._model, tokens, labels, EVALUATED_TOGETHER)

    def node_bytes(self) -> dict[str, int]:
        """Bytes that entered this rank's node since the start, by the ledger. promised: what tables of bytes count; control: the rest."""
        promised, booked = (self._node_bytes(*categories) for categories in (PROMISED, Category))
        return {"promised": promised, "control": booked - promised}

    def _node_bytes(self, *categories: Category) -> int:
        return sum(links.ledger.inter_node_bytes(links.ledger.total(*categories)) for links in self._all_links)

    def close(self) -> None:
        if self._outer is not None:
            self._outer.close()
        self._engine.close()


class LearningRates:
    """The learning rate of one step after the other."""

    def __init__(self, config: Config) -> None:
        self._schedule = LearningRateSchedule.from_config(config.optimizer, config.training, config.sample_lengths)
        self._samples_per_step = config.training.global_batch_size
        self._samples = 0

    def next(self) -> float:
        rate = self._schedule.learning_rate(self._samples)
        self._samples += self._samples_per_step
        return rate
