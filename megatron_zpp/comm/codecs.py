"""Codecs turn values into payloads and back, as a code describes (comm/code.py); each slice has one payload of bytes.

A payload holds the slice's blocks run and its exact run, each padded to 16 bytes:

    | blocks run, encoded | exact run, never quantized |

An exact run holds norm gains and biases: they are few, and errors in them do the most harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, cast

import torch
from torch import Tensor

from megatron_zpp.comm.code import EXACT, Code, Rotation, Rounding, Runs
from megatron_zpp.ops.means import mean_values
from megatron_zpp.ops.quantization import decode_blocks, decode_mean_blocks, encode_blocks, recode_mean_blocks


@dataclass(frozen=True)
class Regions:
    """The values of one or more slices as two matrices: blocks [slices, runs.blocks] and exact [slices, runs.exact]."""

    blocks: Tensor
    exact: Tensor

    @classmethod
    def of(cls, flat: Tensor, runs: Runs) -> Regions:
        """Views of `flat` [slices * runs.numel]: the blocks runs of all slices come first, then their exact runs."""
        slices = flat.numel() // runs.numel
        boundary = slices * runs.blocks
        return cls(flat[:boundary].view(slices, runs.blocks), flat[boundary:].view(slices, runs.exact))

    @property
    def runs(self) -> Runs:
        return Runs(self.blocks.shape[1], self.exact.shape[1])

    @property
    def slices(self) -> int:
        return self.blocks.shape[0]

    def slice_at(self, index: int) -> Regions:
        """The one slice at `index`, as views."""
        return Regions(self.blocks[index : index + 1], self.exact[index : index + 1])

    def range(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flat buffer that both matrices are views of. A range may not span the two regions."""
        boundary = self.blocks.numel()
        if stop <= boundary:
            return self.blocks.view(-1)[start:stop]
        if start < boundary:
            raise RuntimeError(f"elements {start} to {stop} span the regions, which meet at {boundary}")
        return self.exact.view(-1)[start - boundary : stop - boundary]

    def parts(self) -> Iterator[Tensor]:
        """The blocks matrix, then the exact matrix."""
        yield self.blocks
        yield self.exact

    def copy_(self, other: Regions) -> None:
        for part, source in zip(self.parts(), other.parts(), strict=True):
            part.copy_(source)

    def add_(self, other: Regions) -> None:
        for part, source in zip(self.parts(), other.parts(), strict=True):
            part.add_(source)


class Codec(Protocol):
    """Turns slices into payloads and back. Values are fp32, bf16 or fp16; payloads are uint8, in rows that start at multiples of 16 bytes.

    EngineOptions.make_codec makes one codec per unit, link and direction. A codec of your own must keep these rules:
    - It is immutable, and codecs that encode alike compare equal. If both links have equal codecs, a payload crosses both unchanged.
    - payload_bytes depends on `runs` alone, so that all ranks send messages of the same size.
    - The same payload decodes to the same bits on every rank, or ranks would train different weights.
    - Zeros decode to zeros, because padding must stay zero. (Rotated codes are an exception: UnitGradient.clear_padding.)
    - A NaN or inf decodes to a NaN or inf, so that every rank sees it and skips the step.
    - It keeps no state from call to call and no reference to its arguments. The lanes call it without autograd, in a thread or on a CUDA
      stream of their own.

    A climb encodes the own slice from fp32 main weights, and decodes all slices into the working dtype. A descent encodes all slices, from
    the working dtype or from fp32 sums. Each hop of a descent decodes the mean into fp32, and the next hop encodes that mean.

    rests_encoded: whether encoding costs more than a copy. If it does, the engine keeps payloads that are needed again within a step.
    """

    rests_encoded: ClassVar[bool]

    def payload_bytes(self, runs: Runs) -> int:
        """Bytes of one slice's payload, a multiple of 16."""

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        """Encodes `values` into payloads [slices, payload_bytes]. Writes every byte that decoding reads."""

    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        """Decodes payloads [slices, payload_bytes] into `values`."""

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        """Decodes payloads [members, slices, payload_bytes], and writes the mean over members to the fp32 `mean`, or adds it.

        The sum runs over members 0, 1, ... in fp32, then it is divided by their number.
        """

    def keyed(self, key: int) -> Codec:
        """The same codec with stochastic rounding drawn from `key`; the codec itself if it rounds to nearest. Called for every descent."""


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

    def keyed(self, key: int) -> CastCodec:
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
        if self.code.bits is None or (self.noise_key is None) == (self.code.rounding is Rounding.STOCHASTIC):
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
    """The codec of `code`. dtype: of values that are not quantized. Stochastic rounding starts with key 0; `keyed` sets another."""
    if code.is_exact:
        return CastCodec(dtype)
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


def _round_mean(members: Tensor, rounded: Tensor) -> None:
    """Writes the fp32 mean of members [members, slices, run] to `rounded` [slices, run] in its own dtype."""
    if rounded.dtype in (torch.float32, members.dtype):
        mean_values(members, rounded, accumulate=False)
        return
    mean = torch.empty_like(rounded, dtype=torch.float32, memory_format=torch.contiguous_format)
    mean_values(members, mean, accumulate=False)
    rounded.copy_(mean)
