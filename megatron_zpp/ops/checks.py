"""Checks of the arguments of ops. Each raises ValueError, naming what it found and what it expected."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_zpp.ops.payload import PART_ALIGNMENT_BYTES

NOISE_KEYS = 2**63
VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_dtype(name: str, values: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if values.dtype not in dtypes:
        raise ValueError(f"{name} is {values.dtype}; expected {' or '.join(str(dtype) for dtype in dtypes)}.")


def check_values(name: str, values: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    check_dtype(name, values, dtypes)
    if values.dim() != 2:
        raise ValueError(f"{name} has shape {list(values.shape)}; expected [slices, numel].")
    check_inner_dim(name, values)


def check_payloads(name: str, payloads: Tensor, dims: tuple[str, ...], row_bytes: int) -> None:
    if payloads.dtype != torch.uint8:
        raise ValueError(f"{name} is {payloads.dtype}; expected torch.uint8.")
    if payloads.dim() != len(dims) + 1 or payloads.shape[-1] < row_bytes:
        raise ValueError(f"{name} has shape {list(payloads.shape)}; expected [{', '.join(dims)}, at least {row_bytes} bytes].")
    check_inner_dim(name, payloads)
    row_starts = [payloads.storage_offset(), *(payloads.stride(dim) for dim in range(len(dims)) if payloads.shape[dim] > 1)]
    if payloads.numel() and any(start % PART_ALIGNMENT_BYTES for start in row_starts):
        found = f"starts at byte {row_starts[0]} with strides {list(payloads.stride())}"
        raise ValueError(f"{name} {found}; expected rows that start at multiples of {PART_ALIGNMENT_BYTES} bytes.")


def check_inner_dim(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {list(tensor.stride())}; expected a contiguous inner dim.")


def check_rows_apart(name: str, written: Tensor) -> None:
    if written.shape[0] > 1 and written.stride(0) < written.shape[1]:
        found = f"shape {list(written.shape)} and strides {list(written.stride())}"
        raise ValueError(f"{name} has {found}; expected rows that do not overlap.")


def check_has_members(payloads: Tensor) -> None:
    if payloads.shape[0] == 0:
        raise ValueError(f"payloads has shape {list(payloads.shape)}; expected at least one member.")


def check_equal(name: str, found: int, needed: int) -> None:
    if found != needed:
        raise ValueError(f"{name}: {found}; expected {needed}.")


def check_noise_key(noise_key: int | None) -> None:
    if noise_key is not None and not 0 <= noise_key < NOISE_KEYS:
        raise ValueError(f"noise_key is {noise_key}; expected None or 0 to {NOISE_KEYS - 1}.")


def check_same_device(**tensors: Tensor) -> None:
    if len({tensor.device for tensor in tensors.values()}) > 1:
        found = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{found}; expected one device.")
