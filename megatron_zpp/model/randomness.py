"""The dropout of one unit: when its forward needs random numbers, and which."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megatron_zpp.tensor_parallel.random import seeded_random


@dataclass(frozen=True)
class UnitRandomness:
    """The source of the random numbers in one unit's forward."""

    seed: int
    unit_index: int  # place among the units of the model: 0 is the embedding, i + 1 is block i
    has_dropout: bool

    def scope(self, *, training: bool, first_sample: int, device: torch.device) -> AbstractContextManager[None]:
        """The scope to run the unit's forward in; it touches no generator where nothing is dropped."""
        if training and self.has_dropout:
            return seeded_random(self.seed, first_sample, self.unit_index, device)
        return nullcontext()
