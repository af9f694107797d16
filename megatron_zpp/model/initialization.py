"""Initial values of parameters. A rank makes only the elements that it owns; an element has the same value whichever rank makes it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_zpp.config.schema import ModelConfig

# For a range that begins inside a chunk, the elements before it are generated and thrown away. Smaller chunks would waste fewer, but need
# more generators, whose start-up costs time.
CHUNK_NUMEL = 1 << 16
# The two projections that write into the residual stream; see residual_std.
RESIDUAL_PROJECTIONS = ("attention.projection.weight", "mlp.down.weight")


def initial_values(config: ModelConfig, seed: int, name: str, dim_count: int) -> Callable[[int, int], Tensor]:
    """The function that makes initial values of the parameter `name` with `dim_count` dims: (start, stop) -> fp32 [stop - start]."""
    if dim_count == 1:
        is_bias_or_centred_gain = name.endswith(".bias") or config.apply_layernorm_1p
        return partial(constant_values, 0.0 if is_bias_or_centred_gain else 1.0)
    std = residual_std(config) if name.endswith(RESIDUAL_PROJECTIONS) else config.init_method_std
    return partial(normal_values, seed, name, std)


def residual_std(config: ModelConfig) -> float:
    """std / sqrt(2 L), so that the sum of 2 L independent branches has the spread of one branch (GPT-2 report; Megatron's scaled init)."""
    return config.init_method_std / math.sqrt(2.0 * config.num_layers)


def constant_values(value: float, start: int, stop: int) -> Tensor:
    """[stop - start] fp32, all equal to `value`."""
    return torch.full((stop - start,), value, dtype=torch.float32)


def normal_values(seed: int, name: str, std: float, start: int, stop: int) -> Tensor:
    """Elements start..stop of the flattened parameter `name`, normal with mean 0: [stop - start] fp32.

    Every chunk of CHUNK_NUMEL elements has a generator of its own, keyed by (seed, name, chunk).
    """
    values = torch.empty(stop - start, dtype=torch.float32)
    for chunk in range(start // CHUNK_NUMEL, -(-stop // CHUNK_NUMEL)):
        chunk_start = chunk * CHUNK_NUMEL
        begin, end = max(start, chunk_start), min(stop, chunk_start + CHUNK_NUMEL)
        drawn = _chunk_generator(seed, name, chunk).standard_normal(end - chunk_start, dtype=np.float32)
        values[begin - start : end - start] = torch.from_numpy(drawn[begin - chunk_start :])
    return values.mul_(std)


def _chunk_generator(seed: int, name: str, chunk: int) -> np.random.Generator:
    # numpy's Philox has a key of 128 bits. torch's CPU generator keeps only 32 bits of its seed, so two chunks of a large model would be
    # equal; and its normal values depend on the vector instructions of the machine.
    digest = hashlib.blake2b(f"{seed}/{name}/{chunk}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
