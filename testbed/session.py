"""One rank of a run without the training script: model, engine and steps on random tokens, in any world and on any device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from megatron_zpp.comm.backend import Backend, TorchBackend
from megatron_zpp.comm.lanes import Lanes, make_lanes
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.streams import Streams, streams_of
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.data.loader import MicroBatch, TokenPart
from megatron_zpp.model.gpt import GPT
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.monitor.timers import Timers, clock_of
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training import setup
from megatron_zpp.training.instruments import Instruments
from megatron_zpp.training.memory_need import MemoryNeed, memory_need
from megatron_zpp.training.startup_checks import check_backends
from megatron_zpp.training.step import forward_backward, row_of
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.shard import full_weights

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class RankPlace:
    """What a rank needs of its world and its device. streams: of the device; None for a CPU."""

    backend: Backend
    lanes: Lanes
    device: torch.device
    streams: Streams | None = None

    @classmethod
    def alone(cls, device: torch.device, streams: Streams | None = None) -> RankPlace:
        """A world of one rank, without process groups."""
        streams = streams or streams_of(device)
        return cls(TorchBackend(Grid.of_nodes(1, 1), 0, {}), make_lanes(streams), device, streams)


@dataclass
class Session:
    """A model with its engine on one rank. flags: of the training script; those about data only set the vocabulary."""

    flags: str
    place: RankPlace
    observer: Observer = field(default_factory=Observer)

    def __post_init__(self) -> None:
        grid = self.place.backend.grid
        self.config: Config = resolve(parse_flags(self.flags.split()), grid.world_size, grid.ranks_per_node)
        check_backends(self.config, self.place.device)
        self.padded_vocab = setup.build_vocabulary(self.config).padded_size
        ledger = Ledger(grid, self.place.backend.rank)
        links = Links(self.place.backend, self.place.lanes, ledger, self.place.device, self.place.streams)
        self.model: GPT = setup.build_model(self.config, self.padded_vocab, None, links)
        instruments = Instruments(Timers(0, clock_of(self.place.device)), self.observer)
        self.engine: ZeroEngine = setup.build_engine(self.config, self.model, links, instruments)
        self.microbatches = self.config.training.global_batch_size // (self.config.training.micro_batch_size * grid.sample_groups)

    @cached_property
    def need(self) -> MemoryNeed:
        """The planned need of each rank."""
        return memory_need(self.config, self.padded_vocab, self.place.backend.grid, is_on_gpu=self.place.device.type == "cuda")

    def forward_backward(self, step: int) -> Tensor:
        """The sum of this rank's losses; the gradients of the step are on their way."""
        return forward_backward(self.model, self.engine, self.batches(step), self.microbatches)

    def step(self, step: int) -> tuple[float, float]:
        """Mean loss of all ranks, and the norm of the gradient."""
        loss_sum = self.forward_backward(step)
        update = self.engine.update(LEARNING_RATE, report=row_of([loss_sum], self.engine.device))
        return sum(update.report) / (self.microbatches * len(update.report)), update.grad_norm

    def batches(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of this rank in that step, the same in every run. All even steps have the same, so that the loss falls soon."""
        grid = self.place.backend.grid
        for microbatch in range(self.microbatches):
            yield self.batch((step % 2 * self.microbatches + microbatch) * grid.sample_groups + grid.sample_group_of(self.engine.rank))

    def batch(self, number: int) -> MicroBatch:
        """The micro-batch of that number, of which this rank keeps its tokens."""
        samples, length = self.config.training.micro_batch_size, self.config.model.seq_length
        generator = torch.Generator().manual_seed(1000 + number)
        tokens = torch.randint(0, self.config.data.vocab_size or self.padded_vocab, (samples, length + 1), generator=generator)
        whole = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.ones(samples, length), number * samples)
        whole = _in_documents(whole) if self.config.data.reset_attention_mask else whole
        grid = self.place.backend.grid
        return whole.keeping(TokenPart(grid.context_rank_of(self.engine.rank), grid.context_ranks))

    def weights_digest(self) -> str:
        """16 hex digits of all main weights of each tensor rank; every rank must call it."""
        digest = hashlib.sha256()
        for name, weight in full_weights(self.engine):
            digest.update(name.encode() + weight.cpu().numpy().tobytes())
        own = torch.frombuffer(bytearray(digest.digest()[:8]), dtype=torch.uint8).to(self.place.device)
        return self.engine.gather_world(own)[self.engine.data_rank].cpu().numpy().tobytes().hex()

    def close(self) -> None:
        self.engine.close()


def _in_documents(batch: MicroBatch) -> MicroBatch:
    """The same micro-batch; each sample holds two documents, the first of a third of it."""
    samples, length = batch.tokens.shape
    first = length // 3
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(samples, length).contiguous()
    lengths = torch.tensor([first, length - first] * samples)
    return MicroBatch(batch.tokens, batch.labels, batch.loss_mask, batch.first_sample, positions, lengths)
