"""Sums of squares of many tensors in fp64: one sum for each unit.

A sum depends only on the values of the unit's tensors and on where these are cut. So a slice has the same sum in every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_zpp.ops.apex import apex_member
from megatron_zpp.ops.device_kind import kind_of

# Called with the tensors of each unit, [numel] and not empty, and with their device. Returns [units] fp64; a unit without tensors has 0.
SquaredSums = Callable[[Sequence[Sequence[Tensor]], torch.device], Tensor]

CHUNK_NUMEL = 1 << 22  # on a CPU, elements are converted to fp64 one chunk at a time: 32 MiB
_LARGEST_NUMEL = 1 << 30  # the kernels of torch._foreach_norm count the elements of a tensor in 32 bits


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
