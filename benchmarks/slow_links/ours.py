"""Trains one configuration of this repository in a rank; the engine is built from flags as in the training script."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from benchmarks.slow_links.stopwatch import StopwatchLanes
from megatron_zpp.comm.ledger import Category
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.data.loader import MicroBatch
from megatron_zpp.parallel.initialize import World
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.training import setup
from megatron_zpp.training.instruments import make_instruments
from megatron_zpp.training.kernels import prepare_kernels
from megatron_zpp.training.step import forward_backward, gather_numbers

PROMISED = (Category.WEIGHTS, Category.GRADIENTS)


class Training(Protocol):
    """A training that a rank can run; every rank must make the same calls."""

    def step(self) -> float: ...

    def drain(self) -> None: ...

    def node_bytes(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class OurTraining:
    """A model and its engine; every rank must make the same calls."""

    def __init__(self, flags: Sequence[str], launch: Launch, world: World) -> None:
        config = resolve(parse_flags(flags), launch.world_size, launch.local_world_size)
        instruments = make_instruments(config, world.device, launch.rank)
        self._links = setup.build_links(config, world, instruments)
        self.lanes = StopwatchLanes(self._links.lanes)
        self._links.lanes = self.lanes
        prepare_kernels(config, world.device, world.hosts())
        padded_vocab = setup.build_vocabulary(config).padded_size
        self._model = setup.build_model(config, padded_vocab, None, self._links)
        self._engine = setup.build_engine(config, self._model, self._links, instruments)
        self._batches = same_batches(config, range(self._engine.data_rank, launch.world_size, self._engine.data_ranks))
        self._microbatches = microbatches(config, self._engine.data_ranks)
        self._learning_rate, self._weight_decay = config.optimizer.lr, config.optimizer.weight_decay

    def step(self) -> float:
        """The loss of one training step."""
        loss_sum = forward_backward(self._model, self._engine, self._batches, self._microbatches)
        self._engine.update(self._learning_rate, self._weight_decay)
        loss_sums = gather_numbers([loss_sum], self._engine)[:, 0, 0].tolist()
        return sum(loss_sums) / (self._microbatches * len(loss_sums))

    def drain(self) -> None:
        """Returns once the climbs that a step submits for the next one have landed too."""
        self._links.lanes.drain()

    def node_bytes(self) -> dict[str, int]:
        """Bytes that entered this rank's node since the start, by the ledger: weights and gradients (promised), and the rest (control)."""
        ledger = self._links.ledger
        promised = ledger.inter_node_bytes(ledger.total(*PROMISED))
        return {"promised": promised, "control": ledger.inter_node_bytes(ledger.total(*Category)) - promised}

    def close(self) -> None:
        self._engine.close()


def microbatches(config: Config, data_ranks: int) -> int:
    return config.training.global_batch_size // (config.training.micro_batch_size * data_ranks)


def same_batch(config: Config, data_rank: int) -> Iterator[MicroBatch]:
    """Yields the same micro-batch of random tokens forever; it is different on every data rank, and equal in every configuration."""
    return same_batches(config, [data_rank])


def same_batches(config: Config, numbers: Iterable[int]) -> Iterator[MicroBatch]:
    """Yields the micro-batches of these numbers forever, one after the other. Ranks that share layers share those of several ranks."""
    return itertools.cycle([_random_batch(config, number) for number in numbers])


def _random_batch(config: Config, number: int) -> MicroBatch:
    samples, length = config.training.micro_batch_size, config.model.seq_length
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, config.data.vocab_size or 1, (samples, length + 1), generator=generator)
    return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.ones(samples, length), number * samples)
