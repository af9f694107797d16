"""Norms over all ranks. Each rank adds up the squares of its own slice of each unit, in fp64, and then these sums of its units.

So one number of each rank crosses the links, whatever the number of units. Every rank adds those of all ranks, which are in the order of
the slices, and for one slice in that of the ladders. So the norm of equal values has the same bits in every stage, and a NaN or inf on one
rank reaches all ranks. The device does all of this; the host need not wait.

A partial sum depends only on the values of the unit's tensors and on where these are cut. So a slice has the same sum in every stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.links import Links
from megatron_zpp.ops.apex import apex_member
from megatron_zpp.ops.device_kind import kind_of
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.unit import WeightUnit

# Called with the tensors of each unit, [numel] and not empty, and with their device. Returns [units] fp64; a unit without tensors has 0.
SquaredSums = Callable[[Sequence[Sequence[Tensor]], torch.device], Tensor]

CHUNK_NUMEL = 1 << 22  # on a CPU, elements are converted to fp64 one chunk at a time: 32 MiB
_LARGEST_NUMEL = 1 << 30  # the kernels of torch._foreach_norm count the elements of a tensor in 32 bits


def squared_norm(gradients: Sequence[UnitGradient], links: Links, squared_sums: SquaredSums, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The square of the L2 norm of the mean gradient over all units and slices, [] fp64; every rank must call it.

    numbers: [numel] fp64, which the ranks exchange in the same message. Also returns those of every rank, [world_size, numel].
    """
    return _squared_norm([(gradient.layout, gradient.primary) for gradient in gradients], links, squared_sums, numbers)


def weight_norm(units: Sequence[WeightUnit], links: Links, squared_sums: SquaredSums) -> float:
    """The L2 norm of the main weights over all units and slices; every rank must call it, and waits."""
    own = [(unit.layout, unit.main_regions().slice_at(links.own_slice - unit.first_slice)) for unit in units]
    squared, _ = _squared_norm(own, links, squared_sums)
    return math.sqrt(squared.item())


def _squared_norm(
    units: Sequence[tuple[FlatLayout, Regions]], links: Links, squared_sums: SquaredSums, numbers: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """units: for each unit its layout, and its values in this rank's own slice."""
    parts = [list(counted_values(layout, own, links.own_slice)) for layout, own in units]
    of_rank = _sum_in_order(squared_sums(parts, units[0][1].blocks.device).to(links.device)).view(1)
    gathered = links.gather_world(of_rank if numbers is None else torch.cat((of_rank, numbers)))  # [data, tensor, 1 + numbers] fp64
    by_slice = gathered[..., 0].unflatten(0, (links.partitions, links.partition_ranks)).transpose(0, 1)
    return _sum_in_order(by_slice.flatten()), gathered[..., 1:].flatten(0, 1)


def _sum_in_order(values: Tensor) -> Tensor:
    """The sum of [numel] fp64: one after the other on a CPU; a GPU adds in an order of its own, always the same."""
    return values.sum() if kind_of(values.device.type) == "cuda" else values.cumsum(0)[-1]


def counted_values(layout: FlatLayout, own: Regions, own_slice: int) -> Iterator[Tensor]:
    """The values of the own slice that count in a norm."""
    for counted_range, is_counted in layout.ranges_by(lambda segment: segment.counted, own_slice, 1):
        if is_counted:
            yield own.range(counted_range.start, counted_range.stop)


def count_zeros(gradients: Sequence[UnitGradient], links: Links) -> Tensor:
    """Number of zeros in the mean gradient, without padding, [] fp64 (exact up to 2^53); every rank must call it."""
    own = torch.zeros(1, dtype=torch.float64, device=links.device)
    for gradient in gradients:
        segments = gradient.layout.segments(links.own_slice, 1)
        own += sum(segment.stop - segment.start for segment in segments if segment.counted)
        for part in counted_values(gradient.layout, gradient.primary, links.own_slice):
            own -= torch.count_nonzero(part)  # padding is zero and adds nothing
    return links.gather_world(own).sum()


def squared_sums_for(device: torch.device, adam_backend: str) -> SquaredSums:
    """The sums of Apex beside its optimizer. Otherwise those of torch, which are fast on this device."""
    if adam_backend == "apex":
        return squared_sums_by_apex
    return squared_sums_at_once if kind_of(device.type) == "cuda" else squared_sums_by_chunks


def squared_sums_by_chunks(units: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Converts one chunk after the other to fp64, and adds up its squares. On a GPU these would be three kernels per chunk."""
    sums = torch.zeros(len(units), dtype=torch.float64, device=device)
    for total, parts in zip(sums, units, strict=True):
        for part in parts:
            for chunk in part.split(CHUNK_NUMEL):
                total += _squared_sum(chunk)
    return sums


def squared_sums_at_once(units: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Adds up all units in a few kernels, which convert each element where they read it. They return norms, which are squared again."""
    split = [[piece for part in parts for piece in part.split(_LARGEST_NUMEL)] for parts in units]
    most = max(map(len, split))
    zero = torch.zeros(1, device=device)
    padded = [piece for pieces in split for piece in (*pieces, *[zero] * (most - len(pieces)))]
    if not padded:
        return torch.zeros(len(units), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(padded, 2, dtype=torch.float64))
    return norms.square().view(len(units), most).sum(dim=1)


def squared_sums_by_apex(units: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """The same from NVIDIA Apex's multi-tensor L2 norm: one kernel for all tensors of a unit, which adds in fp32."""
    applier, kernel = apex_member("apex.multi_tensor_apply", "multi_tensor_applier"), apex_member("amp_C", "multi_tensor_l2norm")
    overflow = torch.zeros(1, dtype=torch.int32, device=device)
    sums = torch.zeros(len(units), dtype=torch.float64, device=device)
    for total, parts in zip(sums, units, strict=True):
        if parts:
            norm, _ = applier(kernel, overflow, [list(parts)], False)
            total += norm.double().square().sum()
    return sums


def _squared_sum(chunk: Tensor) -> Tensor:
    values = chunk.double()
    return torch.dot(values, values)
