"""Codecs turn values into payloads and back, as a code describes (comm/code.py); each slice has one payload of bytes.

A payload holds the slice's blocks and its exact values, each padded to 16 bytes:

    | blocks, encoded | exact values, never quantized |

Exact values are those of norm gains and biases: they are few, and errors in them do the most harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from megatron_zpp.comm.code import EXACT, Code, Levels, LinkCodes, Rotation, Rounding, SliceShape
from megatron_zpp.comm.codec import Codec, Regions, SignKeys
from megatron_zpp.comm.gaussian_codec import GaussianCodec
from megatron_zpp.ops.means import mean_values
from megatron_zpp.ops.quantization import decode_blocks, decode_mean_blocks, encode_blocks, recode_mean_blocks
from megatron_zpp.parallel.topology import LADDER_LINKS, Link, Topology
from megatron_zpp.system.user_error import UserError

KEY_BITS = 63  # of a key of stochastic rounding, or of the signs of a rotation


@dataclass(frozen=True)
class CastCodec(Codec):
    """Values cast to `dtype`: exact if they have that dtype already."""

    dtype: torch.dtype
    encoding_is_costly: ClassVar[bool] = False

    def payload_bytes(self, slice_shape: SliceShape) -> int:
        return EXACT.payload_bytes(slice_shape, element_bytes=self.dtype.itemsize)

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        self.regions_of(payloads, values.slice_shape).copy_(values)

    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        values.copy_(self.regions_of(payloads, values.slice_shape))

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        for payload_part, mean_part in zip(self.regions_of(payloads, mean.slice_shape).parts(), mean.parts(), strict=True):
            mean_values(payload_part, mean_part, accumulate=accumulate)

    @property
    def family(self) -> Hashable:
        return CastCodec

    def recode_mean_into(self, payloads: Tensor, next_codec: Codec, recoded: Tensor, slice_shape: SliceShape) -> None:
        if next_codec.family != self.family:
            super().recode_mean_into(payloads, next_codec, recoded, slice_shape)
            return
        parts = cast(CastCodec, next_codec).regions_of(recoded, slice_shape).parts()
        for received, part in zip(self.regions_of(payloads, slice_shape).parts(), parts, strict=True):
            _round_mean(received, part)

    def values_at(self, payloads: Tensor, offset_bytes: int, numel: int) -> Tensor:
        """The values [..., numel] that begin at `offset_bytes` in every row of payloads [..., payload_bytes]."""
        return payloads[..., offset_bytes : offset_bytes + numel * self.dtype.itemsize].view(self.dtype)

    def regions_of(self, payloads: Tensor, slice_shape: SliceShape) -> Regions:
        """The values in payloads [..., payload_bytes], as views."""
        return Regions(
            self.values_at(payloads, 0, slice_shape.blocks),
            self.values_at(payloads, EXACT.blocks_bytes(slice_shape.blocks, element_bytes=self.dtype.itemsize), slice_shape.exact),
        )


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Encodes the blocks as integers with one fp32 scale per block, and only casts the exact values.

        | codes | scales | exact values |, each padded to 16 bytes

    code: a code with bits. A Hadamard rotation writes errors into padding as well; the caller sets it to zero again.
    noise_key: stochastic rounding depends on it and on a value's index within one call. None if the code rounds to nearest.
    """

    code: Code
    block_numel: int
    exact: CastCodec
    noise_key: int | None = None
    encoding_is_costly: ClassVar[bool] = True

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

    def payload_bytes(self, slice_shape: SliceShape) -> int:
        return self.code.payload_bytes(slice_shape, element_bytes=self.exact.dtype.itemsize, block_numel=self.block_numel)

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        encode_blocks(
            values.blocks, payloads, bits=self.bits, block_numel=self.block_numel, rotated=self.is_rotated, noise_key=self.noise_key
        )
        self.exact_values(payloads, values.slice_shape).copy_(values.exact)

    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        if self.is_rotated:
            # decode_blocks cannot rotate back, but a mean can, so this is a mean over one member. The engine rotates gradients only, and
            # these are always decoded as means.
            wide = torch.empty_like(values.blocks, dtype=torch.float32)
            self._decode_mean(payloads.unsqueeze(0), wide, accumulate=False)
            values.blocks.copy_(wide)
        else:
            decode_blocks(payloads, values.blocks, bits=self.bits, block_numel=self.block_numel)
        values.exact.copy_(self.exact_values(payloads, values.slice_shape))

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        self._decode_mean(payloads, mean.blocks, accumulate=accumulate)
        mean_values(self.exact_values(payloads, mean.slice_shape), mean.exact, accumulate=accumulate)

    def with_noise(self, key: int) -> BlockCodec:
        return replace(self, noise_key=key) if self.code.rounding is Rounding.STOCHASTIC else self

    @property
    def mixes_neighbours(self) -> bool:
        return self.code.mixes_neighbours

    @property
    def family(self) -> Hashable:
        """Of the same blocks and the same rotation; bits may differ."""
        return self.block_numel, self.code.rotation

    def recode_mean_into(self, payloads: Tensor, next_codec: Codec, recoded: Tensor, slice_shape: SliceShape) -> None:
        """As every codec. To one of its family by one fused kernel, and rotated values stay rotated."""
        if next_codec.family != self.family:
            super().recode_mean_into(payloads, next_codec, recoded, slice_shape)
            return
        following = cast(BlockCodec, next_codec)
        recode_mean_blocks(
            payloads,
            recoded,
            row_numel=slice_shape.blocks,
            bits=self.bits,
            next_bits=following.bits,
            block_numel=self.block_numel,
            noise_key=following.noise_key,
        )
        _round_mean(self.exact_values(payloads, slice_shape), following.exact_values(recoded, slice_shape))

    def exact_values(self, payloads: Tensor, slice_shape: SliceShape) -> Tensor:
        """The exact values [..., slice_shape.exact] of payloads [..., payload_bytes]."""
        offset_bytes = self.code.blocks_bytes(slice_shape.blocks, element_bytes=self.exact.dtype.itemsize, block_numel=self.block_numel)
        return self.exact.values_at(payloads, offset_bytes, slice_shape.exact)

    def _decode_mean(self, payloads: Tensor, mean: Tensor, *, accumulate: bool) -> None:
        decode_mean_blocks(payloads, mean, bits=self.bits, block_numel=self.block_numel, accumulate=accumulate, rotated=self.is_rotated)


CodecFactory = Callable[[Code, torch.dtype, int], Codec]  # arguments: the code, the dtype of values that are not quantized, block_numel


def make_codec(code: Code, dtype: torch.dtype, block_numel: int) -> Codec:
    """The codec of `code`. dtype: of values that are not quantized.

    Stochastic rounding starts with key 0; `with_noise` sets another. Gaussian levels start without keys of signs; `with_signs` sets them.
    Raises UserError if `block_numel` does not suit the code.
    """
    if code.is_exact:
        return CastCodec(dtype)
    if code.levels is Levels.GAUSSIAN:
        return GaussianCodec(code, block_numel, CastCodec(dtype))
    return BlockCodec(code, block_numel, CastCodec(dtype), 0 if code.rounding is Rounding.STOCHASTIC else None)


def _round_mean(members: Tensor, rounded: Tensor) -> None:
    """Writes the fp32 mean of members [members, slices, numel] to `rounded` [slices, numel] in its own dtype."""
    if rounded.dtype in (torch.float32, members.dtype):
        mean_values(members, rounded, accumulate=False)
        return
    mean = torch.empty_like(rounded, dtype=torch.float32, memory_format=torch.contiguous_format)
    mean_values(members, mean, accumulate=False)
    rounded.copy_(mean)


@dataclass(frozen=True)
class LinkCodecs:
    """The codec of each link, in one direction. noise_seed: seed of stochastic rounding and of the signs of rotations."""

    inter: Codec
    intra: Codec
    noise_seed: int = 0

    @classmethod
    def of(cls, codes: LinkCodes, dtype: torch.dtype, block_numel: int, noise_seed: int = 0, make: CodecFactory = make_codec) -> LinkCodecs:
        """The codecs of `codes`, which LinkCodes.in_world has fitted to this world. make: makes one codec.

        Raises UserError if `make` makes something else.
        """
        inter, intra = (make(code, dtype, block_numel) for code in (codes.inter, codes.intra))
        for codec in (inter, intra):
            if not isinstance(codec, Codec):  # what it inherits is called, too
                raise UserError(f"make_codec made a {type(codec).__name__}; let its class inherit from megatron_zpp.comm.codec.Codec")
        return cls(inter, intra, noise_seed)

    @property
    def any_mixes_neighbours(self) -> bool:
        """Whether errors of values spread to their neighbours, which may be padding, on at least one link."""
        return self.inter.mixes_neighbours or self.intra.mixes_neighbours

    def with_noise_for(self, *place: int | str) -> LinkCodecs:
        """The same codecs, whose stochastic rounding draws from `place`: the same numbers in every run, others at every other place."""
        inter, intra = (
            codec.with_noise(noise_key(self.noise_seed, link.name, *place))
            for link, codec in ((Link.INTER, self.inter), (Link.INTRA, self.intra))
        )
        return replace(self, inter=inter, intra=intra)

    def with_signs_for(self, topology: Topology, data_rank: int, *place: int | str) -> LinkCodecs:
        """The same codecs, which rotate with random signs drawn from `place` and the data rank of the sender.

        place: of a hop, such as direction, unit, iteration and micro-batch; the same on all members of the link.
        """
        inter, intra = (
            codec.with_signs(sign_keys(self.noise_seed, link, topology, data_rank, *place)) if codec.mixes_neighbours else codec
            for link, codec in zip(LADDER_LINKS, (self.inter, self.intra), strict=True)
        )
        return replace(self, inter=inter, intra=intra)


def sign_keys(seed: int, link: Link, topology: Topology, data_rank: int, *place: int | str) -> SignKeys:
    """The keys of signs of all members of the link that `data_rank` shares. Every member computes the same, with another one as its own."""
    keys = {sender: noise_key(seed, "signs", link.name, sender, *place) for sender in topology.members(link, data_rank)}
    return SignKeys(keys[data_rank], tuple(keys.values()))


def noise_key(*place: int | str) -> int:
    """A 63-bit number computed from `place` alone, so it is the same in every process, on every machine and after a restart."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - KEY_BITS)
