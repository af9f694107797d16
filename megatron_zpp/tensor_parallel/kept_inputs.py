"""The inputs of recomputed chunks, kept from forward to backward: divided among tensor ranks, in an arena, or on the host.

Source: section 6.1 of ZeRO (Rajbhandari et al., arXiv 1910.02054), "partitioned activation checkpointing".

A rank keeps a part of every input. When backward takes the input of chunk c, the gather of chunk c - 1 starts, and with it the copy of the
part of chunk c - 2 from the host:

    backward    chunk c         recompute c, backward c
                chunk c - 1     gather                      recompute c - 1, backward c - 1
                chunk c - 2     copy from the host          gather                              ...

Chunks are the same on every tensor rank, so all ranks gather in the same order.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_zpp.comm.group_link import Pending
from megatron_zpp.comm.kept_places import Kept, Places
from megatron_zpp.comm.tensor_link import TensorLink, padded_part_numel


class KeptInputs:
    """Keeps the inputs of a model's recomputed chunks. link: to the ranks that each keep a part; None if a rank keeps whole inputs."""

    def __init__(self, places: Places, link: TensorLink | None) -> None:
        self._places = places
        self._link = link

    def of_forward(self) -> InputsOfForward:
        """Those of one micro-batch."""
        return InputsOfForward(self._places, self._link)


class InputsOfForward:
    """The inputs of one forward, chunk after chunk. The graph of autograd holds what is kept, and frees it."""

    def __init__(self, places: Places, link: TensorLink | None) -> None:
        self._places = places
        self._link = link
        self._latest: weakref.ref[_KeptInput] | None = None
        self._next_chunk = 0

    def hooks(self, chunk: int) -> saved_tensors_hooks:
        """The hooks with which torch must save the input of chunk `chunk`, and nothing else."""
        return saved_tensors_hooks(partial(self._pack, chunk), _unpack)

    def _pack(self, chunk: int, whole: Tensor) -> Tensor | _KeptInput:
        if whole.numel() == 0:
            return whole  # older versions of torch save an empty tensor beside the input
        if chunk != self._next_chunk:
            raise RuntimeError(f"one input of chunk {self._next_chunk} is to be kept, and not one of chunk {chunk}")
        self._next_chunk += 1
        values = whole.detach().reshape(-1)
        part = values if self._link is None else _own_part(values, self._link)
        previous = None if self._latest is None else self._latest()
        kept = _KeptInput(self._places.keep(chunk, part), whole.shape, self._link, previous)
        self._latest = weakref.ref(kept)
        return kept


class _KeptInput:
    """The input of one chunk. previous: that of the chunk before it."""

    def __init__(self, part: Kept, shape: torch.Size, link: TensorLink | None, previous: _KeptInput | None) -> None:
        self.previous = previous
        self._part = part
        self._shape = shape
        self._link = link
        self._gathering: Pending | None = None

    @property
    def is_divided(self) -> bool:
        """Whether other ranks have parts of it."""
        return self._link is not None

    def start_copy(self) -> None:
        """Starts to bring the part to the device."""
        if self._gathering is None:
            self._part.start()

    def start_gather(self) -> None:
        """Starts to gather the parts of all ranks, if there are several."""
        if self._link is not None and self._gathering is None:
            self._gathering = self._link.start_gather(self._part.values())

    def whole(self) -> Tensor:
        """The whole input."""
        self.start_gather()
        if self._gathering is None:
            return self._part.values().view(self._shape)
        parts, self._gathering = self._gathering.wait(), None
        return parts.view(-1)[: self._shape.numel()].view(self._shape)


def _unpack(kept: Tensor | _KeptInput) -> Tensor:
    """The whole input of a chunk. What the chunks before it need first is under way afterwards."""
    if isinstance(kept, Tensor):
        return kept
    kept.start_copy()
    before = kept.previous
    if before is None:
        return kept.whole()
    before.start_copy()
    whole = kept.whole()
    before.start_gather()
    if kept.is_divided and before.previous is not None:
        before.previous.start_copy()
    return whole


def _own_part(values: Tensor, link: TensorLink) -> Tensor:
    """A copy of this rank's part of `values` [numel]; the last parts may be padded."""
    part_numel = padded_part_numel(values.numel(), link.ranks, values.element_size())
    own = values[link.rank * part_numel : (link.rank + 1) * part_numel]
    if own.numel() == part_numel:
        return own.clone()
    part = values.new_zeros(part_numel)
    part[: own.numel()] = own
    return part
