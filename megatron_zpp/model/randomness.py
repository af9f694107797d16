"""Random numbers of the forward pass, seeded by run, sample and unit. So they depend neither on the rank nor on earlier draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

MASK_64 = (1 << 64) - 1


@dataclass(frozen=True)
class UnitRandomness:
    """The source of the random numbers in one unit's forward."""

    seed: int
    unit_index: int  # 0 is the embedding, i + 1 is block i
    has_dropout: bool

    def scope(self, *, training: bool, first_sample: int, device: torch.device) -> AbstractContextManager[None]:
        """The context in which to run the unit's forward. Without dropout it leaves the generators alone."""
        if training and self.has_dropout:
            return seeded_random(self.seed, first_sample, self.unit_index, device)
        return nullcontext()


def splitmix64(value: int) -> int:
    """The splitmix64 output for the state `value` (Steele, Lea, Flood, OOPSLA 2014): 64 bits; each depends on all bits of `value`."""
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def mixed_seed(seed: int, first_sample: int, unit_index: int) -> int:
    """The 64-bit seed for one unit's forward over the micro-batch that starts at sample `first_sample`."""
    mixed = 0
    for value in (seed, first_sample, unit_index):
        mixed = splitmix64(mixed ^ (value & MASK_64))
    return mixed


@contextmanager
def seeded_random(seed: int, first_sample: int, unit_index: int, device: torch.device) -> Iterator[None]:
    """Within the context, seeds the device's default generator from the three integers; restores the generator's state afterwards.

    The same integers give the same numbers, in a recomputation and on another rank too.
    torch's CPU generator reads the low 32 bits of a seed, its CUDA generator all 64.
    """
    generator = default_generator(device)
    callers_state = generator.get_state()
    generator.manual_seed(mixed_seed(seed, first_sample, unit_index))
    try:
        yield
    finally:
        generator.set_state(callers_state)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch's own random operations on `device` use."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    raise RuntimeError(f"no default generator is known for device {device}: dropout runs on cpu and cuda")
