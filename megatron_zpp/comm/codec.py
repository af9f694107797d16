"""What a codec is: it turns the values of slices into payloads and back. comm/codecs.py and comm/gaussian_codec.py have the codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_zpp.comm.code import SliceShape


@dataclass(frozen=True)
class SignKeys:
    """The keys from which the members of a link draw the random signs of their rotations, 0 to 2^63 - 1.

    own: of what this rank encodes. senders: of what it decodes, in the order of the members. Every rank computes the keys of all members
    alike (comm/codecs.py:sign_keys). They differ, so that the errors of senders with like values cancel in a mean.
    """

    own: int
    senders: tuple[int, ...]


@dataclass(frozen=True)
class Regions:
    """The values of one or more slices as two matrices: blocks [slices, slice_shape.blocks] and exact [slices, slice_shape.exact]."""

    blocks: Tensor
    exact: Tensor

    @classmethod
    def of(cls, flat: Tensor, slice_shape: SliceShape) -> Regions:
        """Views of `flat` [slices * slice_shape.numel]: the blocks of all slices come first, then their exact values."""
        slices = flat.numel() // slice_shape.numel
        boundary = slices * slice_shape.blocks
        return cls(flat[:boundary].view(slices, slice_shape.blocks), flat[boundary:].view(slices, slice_shape.exact))

    @property
    def slice_shape(self) -> SliceShape:
        return SliceShape(self.blocks.shape[1], self.exact.shape[1])

    @property
    def slices(self) -> int:
        return self.blocks.shape[0]

    def slice_at(self, index: int) -> Regions:
        """The one slice at `index`, as views."""
        return self.slices_at(index, 1)

    def slices_at(self, first: int, count: int) -> Regions:
        """`count` slices from `first` on, as views."""
        return Regions(self.blocks[first : first + count], self.exact[first : first + count])

    def range(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flat buffer that both matrices are views of. Raises RuntimeError if it spans both."""
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


class Codec(ABC):
    """Turns slices into payloads and back. Values are fp32, bf16 or fp16; payloads are uint8, in rows that start at multiples of 16 bytes.

    EngineOptions.make_codec makes the codec of each link in each direction; units may share it. A codec of your own inherits from this
    class, and must keep these rules:
    - It is immutable, and codecs that encode alike compare equal. If both links have equal codecs, a payload crosses both unchanged.
    - payload_bytes depends on `slice_shape` alone, so that all ranks send messages of the same size.
    - The same payload decodes to the same bits on every rank, or ranks would train different weights.
    - Zeros decode to zeros, because padding must stay zero. If mixes_neighbours is true, only blocks of zeros do, and the caller clears the
      padding whenever it has decoded.
    - A NaN or inf decodes to a NaN or inf, so that every rank sees it and skips the step.
    - It keeps no state from call to call and no reference to its arguments. The lanes call it without autograd, in a thread or on a CUDA
      stream of their own.

    A climb encodes the rank's own slice from fp32 main weights, or from frozen ones in their own type, and decodes all slices into the
    working dtype. A descent encodes all slices, from the working dtype or from fp32 sums. Each hop of a descent decodes the mean into fp32,
    and the next hop encodes that mean.
    A world of one rank uses no codec.

    encoding_is_costly: whether encoding costs more than a copy. If it does, the engine keeps payloads that are needed again within a step.
    """

    encoding_is_costly: ClassVar[bool]

    @property
    def mixes_neighbours(self) -> bool:
        """Whether the error of a value spreads to its neighbours, which may be padding. Not unless a codec says so."""
        return False

    @abstractmethod
    def payload_bytes(self, slice_shape: SliceShape) -> int:
        """Bytes of one slice's payload, a multiple of 16."""

    @abstractmethod
    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        """Encodes `values` into payloads [slices, payload_bytes]. Writes every byte that decoding reads."""

    @abstractmethod
    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        """Decodes payloads [slices, payload_bytes] into `values`."""

    @abstractmethod
    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        """Decodes payloads [members, slices, payload_bytes], and writes the mean over members to the fp32 `mean`, or adds it.

        The sum runs over members 0, 1, ... in fp32, then it is divided by their number.
        """

    def with_noise(self, key: int) -> Codec:
        """The same codec with stochastic rounding drawn from `key`; the codec itself if it rounds to nearest, as here.

        Called for every descent.
        """
        return self

    def with_signs(self, keys: SignKeys) -> Codec:
        """The same codec with the random signs of its rotation drawn from `keys`; the codec itself if it has none, as here.

        Called if mixes_neighbours is true.
        """
        return self

    def of_sender(self, member: int) -> Codec:
        """The same codec for messages of this member of the link alone; the codec itself if all members encode alike, as here."""
        return self

    @property
    def family(self) -> Hashable:
        """Codecs of equal families recode into each other by `recode_mean_into` of their own. None: a mean of values is between them."""
        return None

    def recode_mean_into(self, payloads: Tensor, next_codec: Codec, recoded: Tensor, slice_shape: SliceShape) -> None:
        """Fills recoded [slices, next payload_bytes] with the mean over members of payloads [members, slices, payload_bytes].

        Called between the two hops of a descent. The mean is in fp32 before `next_codec` encodes it.
        """
        mean = Regions.of(torch.empty(recoded.shape[0] * slice_shape.numel, dtype=torch.float32, device=recoded.device), slice_shape)
        self.decode_mean_into(payloads, mean, accumulate=False)
        next_codec.encode_into(mean, recoded)

    def add_into(self, payloads: Tensor, values: Regions) -> None:
        """Adds the blocks of payloads [slices, payload_bytes], one from each member of a link, to `values`, and replaces the exact values.

        Called for weights that cross as differences. Sums are fp32, then rounded to the dtype of `values`.
        """
        decoded = Regions(*(torch.empty_like(part, dtype=torch.float32) for part in values.parts()))
        self.decode_into(payloads, decoded)
        values.blocks.add_(decoded.blocks)
        values.exact.copy_(decoded.exact)
