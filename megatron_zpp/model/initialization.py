"""Initial values of parameters. A rank makes only the elements that it owns; an element has the same value whichever rank makes it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_zpp.parallel.division import Division, Stripe

if TYPE_CHECKING:
    from megatron_zpp.config.schema import ModelConfig

# For a range that begins inside a chunk, the elements before it are generated and thrown away. Smaller chunks would waste fewer, but need
# more generators, whose start-up costs time.
CHUNK_NUMEL = 1 << 16
# A part of columns draws whole rows and keeps its columns. It draws about this many elements at a time, because each time the elements
# between the start of a chunk and the first row are drawn, too.
BATCH_NUMEL = 1 << 20
# The two projections that write into the residual stream; see residual_std.
RESIDUAL_PROJECTIONS = ("attention.projection.weight", "mlp.down.weight")

Values = Callable[[int, int], Tensor]


def initial_values(config: ModelConfig, seed: int, name: str, division: Division) -> Values:
    """The function that makes initial values of a tensor rank's part of the parameter `name`: (start, stop) -> fp32 [stop - start].

    An element of the whole parameter has the same value in every part.
    """
    if len(division.shape) == 1:
        is_bias_or_centred_gain = name.endswith(".bias") or config.apply_layernorm_1p
        return partial(constant_values, 0.0 if is_bias_or_centred_gain else 1.0)
    std = residual_std(config) if name.endswith(RESIDUAL_PROJECTIONS) else config.init_method_std
    return partial(values_of_part, division, partial(normal_values, seed, name, std))


def residual_std(config: ModelConfig) -> float:
    """std / sqrt(2 L), so that the sum of 2 L independent branches has the spread of one branch (GPT-2 report; Megatron's scaled init)."""
    return config.init_method_std / math.sqrt(2.0 * config.num_layers)


def constant_values(value: float, start: int, stop: int) -> Tensor:
    """[stop - start] fp32, all equal to `value`."""
    return torch.full((stop - start,), value, dtype=torch.float32)


def values_of_part(division: Division, whole: Values, start: int, stop: int) -> Tensor:
    """Elements start..stop of a flattened part: [stop - start] fp32. whole: the same for the flattened whole parameter."""
    stripes = [_values_of_stripe(division.width, whole, placed.stripe) for placed in division.stripes(start, stop)]
    if len(stripes) == 1:
        return stripes[0]
    return torch.cat(stripes) if stripes else torch.empty(0, dtype=torch.float32)


def _values_of_stripe(width: int, whole: Values, stripe: Stripe) -> Tensor:
    """The elements of a stripe of a parameter with `width` columns: [numel] fp32."""
    first, last = stripe.columns
    own = last - first
    if own == width:
        return whole(stripe.start, stripe.stop)
    values = torch.empty(stripe.numel, dtype=torch.float32)
    batch_rows = max(1, BATCH_NUMEL // width)
    for row in range(stripe.start // own, -(-stripe.stop // own), batch_rows):
        begin, end = max(stripe.start, row * own), min(stripe.stop, (row + batch_rows) * own)
        rows = whole(row * width, -(-end // own) * width).view(-1, width)
        kept = rows[:, first:last].reshape(-1)
        values[begin - stripe.start : end - stripe.start] = kept[begin - row * own : end - row * own]
    return values


def normal_values(seed: int, name: str, std: float, start: int, stop: int) -> Tensor:
    """Elements start..stop of the flattened parameter `name`, normal with mean 0: [stop - start] fp32.

    Every chunk of CHUNK_NUMEL elements has a generator of its own, keyed by (seed, name, chunk). As many threads as torch has draw them.
    """
    values = torch.empty(stop - start, dtype=torch.float32)
    chunks = range(start // CHUNK_NUMEL, -(-stop // CHUNK_NUMEL))
    draw = partial(_draw_chunk, values.numpy(), start, partial(_chunk_generator, seed, name))
    threads = min(torch.get_num_threads(), len(chunks))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(draw, chunks))
    else:
        for chunk in chunks:
            draw(chunk)
    return values.mul_(std)


def _draw_chunk(values: Any, start: int, generator_of: Callable[[int], np.random.Generator], chunk: int) -> None:
    """Fills the elements of this chunk in `values` [numel] fp32, which has those from `start` on. Other threads run meanwhile."""
    before = chunk * CHUNK_NUMEL - start  # where the chunk begins in `values`; less than 0 if its first elements are not asked for
    own = values[max(0, before) : before + CHUNK_NUMEL]
    if before >= 0:
        generator_of(chunk).standard_normal(dtype=np.float32, out=own)
    else:
        own[:] = generator_of(chunk).standard_normal(len(own) - before, dtype=np.float32)[-before:]


def _chunk_generator(seed: int, name: str, chunk: int) -> np.random.Generator:
    # numpy's Philox has a key of 128 bits. torch's CPU generator keeps only 32 bits of its seed, so two chunks of a large model would be
    # equal; and its normal values depend on the vector instructions of the machine.
    digest = hashlib.blake2b(f"{seed}/{name}/{chunk}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
