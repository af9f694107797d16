"""Random numbers of the forward pass: functions of seed, sample and unit. So they depend neither on the rank nor on earlier draws.

Hidden dropout also knows token and channel (`mask_starts`), so a sample has the same mask in every micro-batch. Attention dropout draws in
torch's kernel, from a generator that is seeded for every micro-batch (`scope`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.ops.dropout import KEYS, Gaps, mask_start
from megatron_zpp.ops.reference import UINT64, splitmix64
from megatron_zpp.tensor_parallel.context import TensorParallel


@dataclass(frozen=True)
class UnitRandomness:
    """The source of the random numbers in one unit's forward."""

    seed: int
    unit_index: int  # 0 is the embedding, i + 1 is block i
    tensor: TensorParallel | None = None
    context: ContextLink | None = None

    def mask_starts(self, sites: int, first_sample: int, hidden_BSH: Tensor) -> tuple[Tensor, ...]:
        """The starts of the masks of as many sites: the places in the unit that drop elements of tensors shaped like `hidden_BSH`.

        The index of an element counts through the whole run: ((sample of the run x S) + token) x H + channel. Ranks that divide samples
        have the elements of some tokens of each sample.
        """
        _, length, channels = hidden_BSH.shape
        parts, own_part = (1, 0) if self.tensor is None else (self.tensor.token_parts, self.tensor.own_token_part)
        of_sample, before = parts * length * channels, own_part * hidden_BSH.numel()  # of those that tensor ranks share
        first_index, gaps = first_sample * of_sample + before, None
        if self.context is not None:
            samples_before, rest = divmod(before, of_sample)
            share, shares = self.context.rank, self.context.ranks
            first_index = ((first_sample + samples_before) * shares + share) * of_sample + rest
            gaps = Gaps(of_sample - rest, of_sample, (shares - 1) * of_sample)
        keys = [mixed(self.seed, self.unit_index, site) % KEYS for site in range(sites)]
        return tuple(mask_start(key, first_index, gaps) for key in keys)

    def scope(self, *, is_needed: bool, first_sample: int, device: torch.device) -> AbstractContextManager[None]:
        """The context in which attention draws. If it is not needed, it leaves the generators alone.

        Ranks that share layers or divide samples have different heads, so they draw different numbers.
        """
        if not is_needed or device.type == "meta":
            return nullcontext()
        of_tensor_rank = () if self.tensor is None else (self.tensor.link.rank + 1,)
        of_context_rank = () if self.context is None else (-1 - self.context.rank,)
        return seeded_random(device, self.seed, first_sample, self.unit_index, *of_tensor_rank, *of_context_rank)


def mixed(*values: int) -> int:
    """64 bits that depend on all bits of all values, and on their order."""
    result = 0
    for value in values:
        result = splitmix64(result ^ (value & UINT64))
    return result


@contextmanager
def seeded_random(device: torch.device, *numbers: int) -> Iterator[None]:
    """Within the context, seeds the device's default generator from the numbers; restores the generator's state afterwards.

    The same numbers give the same draws, in a recomputation and on another rank too.
    torch's CPU generator reads the low 32 bits of a seed, its CUDA generator all 64.
    """
    generator = default_generator(device)
    callers_state = generator.get_state()
    generator.manual_seed(mixed(*numbers))
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
    raise RuntimeError(f"no default generator is known for device {device}: attention dropout runs on cpu and cuda")
