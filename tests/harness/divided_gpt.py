"""A small GPT whose layers and samples ranks may share, trained by the engine on the ranks of a virtual world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.codes import lean
from harness.divided_model import DividedRank, History, Stated, Trained, bits_of, trained_by
from harness.small_engine import Job
from harness.tensor_parts import VOCAB, config_of
from harness.worlds import run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import Code, LinkCodes
from megatron_zpp.comm.links import Links
from megatron_zpp.model.gpt import GPT
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.zero.policy import (
    POLICIES,
    ZEROPP,
    with_gradients_summed_on_secondary,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
)

SAMPLES, LENGTH = 8, 12  # of all data ranks in a step
FIELDS: dict[str, Any] = {"seq_length": LENGTH, "max_position_embeddings": 16, "num_layers": 2}
HPZ = with_secondary_weights(POLICIES[3])
CODES = LinkCodes(Code.gaussian(3, rounds=1), Code(8))
LEAN = with_gradients_summed_on_secondary(lean(3, bits=2))
ROWS = {**{f"stage {stage}": policy for stage, policy in POLICIES.items()}, "hpZ": HPZ, "paper": ZEROPP, "lean": LEAN}
ROWS |= {"qwZ": with_quantized_weights(POLICIES[3], Code(8)), "qgZ": with_quantized_gradients(POLICIES[3], LinkCodes(Code(4), Code(8)))}
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_num_layers": 1}
CLIPS = 0.05  # below the norm of every step here


@dataclass
class GptRank(DividedRank):
    """One rank that trains a GPT. gpt: one of harness.tensor_parts.MODELS; changes: of its configuration."""

    gpt: str = "GPT-2"
    sequence_parallel: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)

    def _make_model(self, links: Links) -> GPT:
        tensor = None if links.tensor_link is None else TensorParallel(links.tensor_link, self.sequence_parallel)
        return GPT(config_of(self.gpt, **FIELDS | dict(self.changes)), VOCAB, 7, self.job.dtype, tensor, links.context_link)

    def loss(self, step: int, microbatch: int = 0) -> Tensor:
        tokens, labels = self.batch(step, microbatch)
        loss: Tensor = self.model(tokens, labels, first_sample=step * SAMPLES + self._first_sample(microbatch)).mean()
        return loss

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1000 + step))
        first = self._first_sample(microbatch)
        grid = self.backend.grid
        tokens, labels = (
            part.chunk(grid.context_ranks, dim=1)[grid.context_rank_of(self.backend.rank)]
            for part in (text[first : first + self._samples, :-1], text[first : first + self._samples, 1:])
        )
        return tokens, labels

    @property
    def _samples(self) -> int:
        return SAMPLES // (self.backend.grid.sample_groups * self.job.microbatches)

    def _first_sample(self, microbatch: int) -> int:
        grid = self.backend.grid
        return (microbatch * grid.sample_groups + grid.sample_group_of(self.backend.rank)) * self._samples


def train_gpt(grid: Grid, job: Job, gpt: str, *, sequence_parallel: bool = False, rate: float | None = None, **changes: Any) -> Trained:
    """A run in which nothing else happens. Fails if an element has not the same bits wherever it rests. rate: of learning."""

    def program(backend: VirtualBackend) -> tuple[History, Stated]:
        rank = GptRank(job, backend, gpt=gpt, sequence_parallel=sequence_parallel, changes=changes)
        history = rank.train() if rate is None else rank.train_at(rate)
        return history, rank.stated()

    return trained_by(run_world(grid, program))


def same_bits(one: Trained, other: Trained) -> bool:
    """Whether losses, norms and all states of two runs are equal, bit for bit."""
    states = all(torch.equal(bits_of(values), bits_of(other.state[key])) for key, values in one.state.items())
    return one.histories == other.histories and states
