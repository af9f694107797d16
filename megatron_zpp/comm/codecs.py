"""Codecs turn values into payloads and back, as a code describes (comm/code.py); each slice has one payload of bytes.

A payload holds the slice's blocks run and its exact run, each padded to 16 bytes:

    | blocks run, encoded | exact run, never quantized |

An exact run holds norm gains and biases: they are few, and errors in them do the most harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from megatron_zpp.comm.code import EXACT, Code, Levels, Rotation, Rounding, Runs
from megatron_zpp.comm.codec import Codec, Regions, SignKeys
from megatron_zpp.comm.gaussian_codec import GaussianCodec
from megatron_zpp.ops.means import mean_values
from megatron_zpp.ops.quantization import decode_blocks, decode_mean_blocks, encode_blocks, recode_mean_blocks


@dataclass(frozen=True)
class CastCodec:
    """Values cast to `dtype`: exact if they have that dtype already."""

    dtype: torch.dtype
    rests_encoded: ClassVar[bool] = False

    def payload_bytes(self, runs: Runs) -> int:
        return EXACT.payload_bytes(runs, element_bytes=self.dtype.itemsize)

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        self.regions_of(payloads, values.runs).copy_(values)

    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        values.copy_(self.regions_of(payloads, values.runs))

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        for payload_part, mean_part in zip(self.regions_of(payloads, mean.runs).parts(), mean.parts(), strict=True):
            mean_values(payload_part, mean_part, accumulate=accumulate)

    @property
    def mixes_neighbours(self) -> bool:
        return False

    def keyed(self, key: int) -> CastCodec:
        return self

    def signed(self, keys: SignKeys) -> CastCodec:
        return self

    def of_sender(self, member: int) -> CastCodec:
        return self

    def run_at(self, payloads: Tensor, offset_bytes: int, numel: int) -> Tensor:
        """The values [..., numel] that begin at `offset_bytes` in every row of payloads [..., payload_bytes]."""
        return payloads[..., offset_bytes : offset_bytes + numel * self.dtype.itemsize].view(self.dtype)

    def regions_of(self, payloads: Tensor, runs: Runs) -> Regions:
        """The values in payloads [..., payload_bytes], as views."""
        return Regions(
            self.run_at(payloads, 0, runs.blocks),
            self.run_at(payloads, EXACT.blocks_bytes(runs.blocks, element_bytes=self.dtype.itemsize), runs.exact),
        )


@dataclass(frozen=True)
class BlockCodec:
    """Encodes the blocks run as integers with one fp32 scale per block, and only casts the exact run.

        | codes | scales | exact run |, each padded to 16 bytes

    code: a code with bits. A Hadamard rotation spreads errors to the padding after a parameter as well; a caller that needs zeros there
    writes them.
    noise_key: stochastic rounding depends on it and on a value's index within one call. None if the code rounds to nearest.
    """

    code: Code
    block_numel: int
    exact: CastCodec
    noise_key: int | None = None
    rests_encoded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (
            self.code.bits is None
            or self.code.levels is not Levels.UNIFORM
            or (self.noise_key is None) == (self.code.rounding is Rounding.STOCHASTIC)
        ):
            raise RuntimeError(f"a codec of blocks cannot have {self.code} and noise key {self.noise_key}")

    @property
    def bits(self) -> int:
        return cast(int, self.code.bits)

    @property
    def is_rotated(self) -> bool:
        return self.code.rotation is Rotation.HADAMARD

    def payload_bytes(self, runs: Runs) -> int:
        return self.code.payload_bytes(runs, element_bytes=self.exact.dtype.itemsize, block_numel=self.block_numel)

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        encode_blocks(
            values.blocks, payloads, bits=self.bits, block_numel=self.block_numel, rotated=self.is_rotated, noise_key=self.noise_key
        )
        self.exact_run(payloads, values.runs).copy_(values.exact)

    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        if self.is_rotated:
            # decode_blocks cannot rotate back, but a mean can, so this is a mean over one member. The engine rotates gradients only, and
            # these are always decoded as means.
            wide = torch.empty_like(values.blocks, dtype=torch.float32)
            self._decode_mean(payloads.unsqueeze(0), wide, accumulate=False)
            values.blocks.copy_(wide)
        else:
            decode_blocks(payloads, values.blocks, bits=self.bits, block_numel=self.block_numel)
        values.exact.copy_(self.exact_run(payloads, values.runs))

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        self._decode_mean(payloads, mean.blocks, accumulate=accumulate)
        mean_values(self.exact_run(payloads, mean.runs), mean.exact, accumulate=accumulate)

    def keyed(self, key: int) -> BlockCodec:
        return replace(self, noise_key=key) if self.code.rounding is Rounding.STOCHASTIC else self

    def signed(self, keys: SignKeys) -> BlockCodec:
        return self

    def of_sender(self, member: int) -> BlockCodec:
        return self

    @property
    def mixes_neighbours(self) -> bool:
        return self.code.mixes_neighbours

    def has_blocks_of(self, other: BlockCodec) -> bool:
        """Whether both have the same blocks and the same rotation; their bits may differ."""
        return (self.block_numel, self.code.rotation) == (other.block_numel, other.code.rotation)

    def exact_run(self, payloads: Tensor, runs: Runs) -> Tensor:
        """The exact runs [..., runs.exact] of payloads [..., payload_bytes]."""
        offset_bytes = self.code.blocks_bytes(runs.blocks, element_bytes=self.exact.dtype.itemsize, block_numel=self.block_numel)
        return self.exact.run_at(payloads, offset_bytes, runs.exact)

    def _decode_mean(self, payloads: Tensor, mean: Tensor, *, accumulate: bool) -> None:
        decode_mean_blocks(payloads, mean, bits=self.bits, block_numel=self.block_numel, accumulate=accumulate, rotated=self.is_rotated)


CodecFactory = Callable[[Code, torch.dtype, int], Codec]  # arguments: the code, the dtype of values that are not quantized, block_numel


def make_codec(code: Code, dtype: torch.dtype, block_numel: int) -> Codec:
    """The codec of `code`. dtype: of values that are not quantized.

    Stochastic rounding starts with key 0; `keyed` sets another. Gaussian levels start without keys of signs; `signed` sets them.
    Raises ValueError if `block_numel` does not suit the code.
    """
    if code.is_exact:
        return CastCodec(dtype)
    if code.levels is Levels.GAUSSIAN:
        return GaussianCodec(code, block_numel, CastCodec(dtype))
    return BlockCodec(code, block_numel, CastCodec(dtype), 0 if code.rounding is Rounding.STOCHASTIC else None)


def recode_mean_into(codec: Codec, payloads: Tensor, next_codec: Codec, recoded: Tensor, runs: Runs) -> None:
    """Fills recoded [slices, next payload_bytes] with the mean over members of payloads [members, slices, payload_bytes].

    Called between the two hops of a descent. The mean is in fp32 before `next_codec` encodes it. If both codecs have the same blocks, one
    fused kernel does both, and rotated values stay rotated; likewise if neither quantizes.
    """
    if isinstance(codec, CastCodec) and isinstance(next_codec, CastCodec):
        for received, part in zip(codec.regions_of(payloads, runs).parts(), next_codec.regions_of(recoded, runs).parts(), strict=True):
            _round_mean(received, part)
        return
    if isinstance(codec, BlockCodec) and isinstance(next_codec, BlockCodec) and codec.has_blocks_of(next_codec):
        recode_mean_blocks(
            payloads,
            recoded,
            run_numel=runs.blocks,
            bits=codec.bits,
            next_bits=next_codec.bits,
            block_numel=codec.block_numel,
            noise_key=next_codec.noise_key,
        )
        _round_mean(codec.exact_run(payloads, runs), next_codec.exact_run(recoded, runs))
        return
    mean = Regions.of(torch.empty(recoded.shape[0] * runs.numel, dtype=torch.float32, device=recoded.device), runs)
    codec.decode_mean_into(payloads, mean, accumulate=False)
    next_codec.encode_into(mean, recoded)


def add_decoded_(codec: Codec, payloads: Tensor, values: Regions) -> None:
    """Adds the blocks of payloads [slices, payload_bytes], one from each member of a link, to those of `values`; exact runs are replaced.

    Sums are fp32, then rounded to the dtype of `values`.
    """
    if isinstance(codec, GaussianCodec):
        codec.add_into(payloads, values)
        return
    decoded = Regions(*(torch.empty_like(part, dtype=torch.float32) for part in values.parts()))
    codec.decode_into(payloads, decoded)
    values.blocks.add_(decoded.blocks)
    values.exact.copy_(decoded.exact)


def _round_mean(members: Tensor, rounded: Tensor) -> None:
    """Writes the fp32 mean of members [members, slices, run] to `rounded` [slices, run] in its own dtype."""
    if rounded.dtype in (torch.float32, members.dtype):
        mean_values(members, rounded, accumulate=False)
        return
    mean = torch.empty_like(rounded, dtype=torch.float32, memory_format=torch.contiguous_format)
    mean_values(members, mean, accumulate=False)
    rounded.copy_(mean)
