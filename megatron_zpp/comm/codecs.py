"""What values look like while they cross a link: one payload of bytes per slice.

A payload holds the slice's blocks run and its exact run, each padded to 16 bytes:

    | blocks run, encoded | exact run, never quantized |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PAYLOAD_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Runs:
    """How many elements a slice has in each of its two regions."""

    blocks: int
    exact: int

    @property
    def numel(self) -> int:
        return self.blocks + self.exact


@dataclass(frozen=True)
class Regions:
    """The values of several slices as two matrices: blocks [slices, runs.blocks] and exact [slices, runs.exact]."""

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
        """Elements [start, stop) of the flat buffer whose views these are; a range may not span the two regions."""
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
    """How the slices of a rung become payloads and back. Values are fp32, bf16 or fp16; payloads are uint8."""

    def payload_bytes(self, runs: Runs) -> int:
        """Bytes of one slice's payload, a multiple of 16."""

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        """Fills payloads [slices, payload_bytes] from `values`."""

    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        """Fills `values` from payloads [slices, payload_bytes]."""

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        """Writes to the fp32 `mean`, or adds to it, the mean over members of payloads [members, slices, payload_bytes].

        The sum runs over members 0, 1, ... in fp32, then it is divided by their number.
        """


@dataclass(frozen=True)
class CastCodec:
    """Values as they are, cast to `dtype`: exact where they have that dtype already."""

    dtype: torch.dtype

    def payload_bytes(self, runs: Runs) -> int:
        return self._padded_bytes(runs.blocks) + self._padded_bytes(runs.exact)

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        self._regions(payloads, values.runs).copy_(values)

    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        values.copy_(self._regions(payloads, values.runs))

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        members = [self._regions(payload, mean.runs) for payload in payloads]
        total = _like(mean) if accumulate else mean
        total.copy_(members[0])
        for member in members[1:]:
            total.add_(member)
        for part in total.parts():
            part.div_(len(members))
        if accumulate:
            mean.add_(total)

    def _regions(self, payloads: Tensor, runs: Runs) -> Regions:
        element_bytes = self.dtype.itemsize
        boundary = self._padded_bytes(runs.blocks)
        return Regions(
            payloads[:, : runs.blocks * element_bytes].view(self.dtype),
            payloads[:, boundary : boundary + runs.exact * element_bytes].view(self.dtype),
        )

    def _padded_bytes(self, numel: int) -> int:
        return -(-numel * self.dtype.itemsize // PAYLOAD_ALIGNMENT_BYTES) * PAYLOAD_ALIGNMENT_BYTES


def recode_mean_into(codec: Codec, payloads: Tensor, next_codec: Codec, recoded: Tensor, runs: Runs) -> None:
    """Fills recoded [slices, next payload_bytes] with the mean over members of payloads [members, slices, payload_bytes].

    The middle of a two-hop descent; the mean is in fp32 before `next_codec` encodes it.
    """
    scratch = torch.empty(recoded.shape[0] * runs.numel, dtype=torch.float32, device=payloads.device)
    mean = Regions.of(scratch, runs)
    codec.decode_mean_into(payloads, mean, accumulate=False)
    next_codec.encode_into(mean, recoded)


def _like(values: Regions) -> Regions:
    return Regions(torch.empty_like(values.blocks), torch.empty_like(values.exact))
