"""Block quantization of payload rows: encode, decode, and the means that descents need.

Every `block_numel` values of a run share one fp32 scale; codes have 8 or 4 bits (ZeRO++, arXiv 2306.10209). A payload row:

    | codes, padded to 16 bytes | scales fp32, padded to 16 bytes | bytes of the caller, never touched |

megatron_zpp.ops.reference defines the arithmetic. The kernels of csrc/ give the same bits; they run if they are loaded and support the
device. Every function raises ValueError for a wrong argument, naming what it found and what it expected.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops import extension, reference
from megatron_zpp.ops.payload import PART_ALIGNMENT_BYTES, coded_bytes

NOISE_KEYS = 2**63
VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def encode_blocks(
    values: Tensor, payloads: Tensor, *, bits: int, block_numel: int, rotated: bool = False, noise_key: int | None = None
) -> None:
    """Fills codes and scales of `payloads` [slices, >= coded_bytes] uint8 from `values` [slices, run] fp32, bf16 or fp16.

    A block with a value that is not finite decodes to NaN.
    rotated: every 32 neighbours are rotated first; only decode_mean_blocks(rotated=True) restores the values.
    noise_key: 0 to 2**63 - 1. Codes are rounded up or down at random and without bias; the key and the value's index in `values` decide.
    None: codes are rounded to the nearest.
    """
    _check_values("values", values, VALUE_DTYPES)
    slices, run_numel = values.shape
    _check_payloads("payloads", payloads, ("slices",), coded_bytes(run_numel, bits, block_numel))
    _check_equal("slices of payloads", payloads.shape[0], slices)
    _check_rows_apart("payloads", payloads)
    _check_same_device(values=values, payloads=payloads)
    _check_noise_key(noise_key)
    _ops_for(payloads).encode_blocks(values, payloads, bits, block_numel, rotated, noise_key)


def decode_blocks(payloads: Tensor, values: Tensor, *, bits: int, block_numel: int) -> None:
    """Fills `values` [slices, run] fp32, bf16 or fp16 from `payloads` [slices, >= coded_bytes] uint8."""
    _check_values("values", values, VALUE_DTYPES)
    slices, run_numel = values.shape
    _check_payloads("payloads", payloads, ("slices",), coded_bytes(run_numel, bits, block_numel))
    _check_equal("slices of payloads", payloads.shape[0], slices)
    _check_rows_apart("values", values)
    _check_same_device(payloads=payloads, values=values)
    _ops_for(values).decode_blocks(payloads, values, bits, block_numel)


def decode_mean_blocks(payloads: Tensor, mean: Tensor, *, bits: int, block_numel: int, accumulate: bool, rotated: bool = False) -> None:
    """Writes the mean over members of `payloads` to `mean` [slices, run] fp32, or adds it.

    payloads: [members, slices, >= coded_bytes] uint8. Members 0, 1, ... are summed in fp32 in this order, then divided by their number.
    rotated: the payloads hold rotated values, and the mean is rotated back.
    """
    _check_values("mean", mean, (torch.float32,))
    slices, run_numel = mean.shape
    _check_payloads("payloads", payloads, ("members", "slices"), coded_bytes(run_numel, bits, block_numel))
    _check_equal("slices of payloads", payloads.shape[1], slices)
    _check_has_members(payloads)
    _check_rows_apart("mean", mean)
    _check_same_device(payloads=payloads, mean=mean)
    _ops_for(mean).decode_mean_blocks(payloads, mean, bits, block_numel, accumulate, rotated)


def recode_mean_blocks(
    payloads: Tensor, recoded: Tensor, *, run_numel: int, bits: int, next_bits: int, block_numel: int, noise_key: int | None = None
) -> None:
    """Fills codes and scales of `recoded` with the mean over members of `payloads`, encoded with next_bits.

    payloads: [members, slices, >= coded_bytes] uint8. recoded: [slices, >= coded_bytes at next_bits] uint8.
    Gives the same bits as decode_mean_blocks into fp32, then encode_blocks with `noise_key`. If `payloads` are rotated, so is `recoded`.
    """
    _check_payloads("payloads", payloads, ("members", "slices"), coded_bytes(run_numel, bits, block_numel))
    _check_payloads("recoded", recoded, ("slices",), coded_bytes(run_numel, next_bits, block_numel))
    _check_equal("slices of recoded", recoded.shape[0], payloads.shape[1])
    _check_has_members(payloads)
    _check_rows_apart("recoded", recoded)
    _check_same_device(payloads=payloads, recoded=recoded)
    _check_noise_key(noise_key)
    _ops_for(recoded).recode_mean_blocks(payloads, recoded, run_numel, bits, next_bits, block_numel, noise_key)


def _ops_for(tensor: Tensor) -> ModuleType | Any:
    return torch.ops.megatron_zpp if extension.has_kernels_for(tensor.device.type) else reference


def _check_values(name: str, values: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if values.dtype not in dtypes:
        raise ValueError(f"{name} is {values.dtype}; expected {' or '.join(str(dtype) for dtype in dtypes)}.")
    if values.dim() != 2:
        raise ValueError(f"{name} has shape {list(values.shape)}; expected [slices, run].")
    _check_inner_dim(name, values)


def _check_payloads(name: str, payloads: Tensor, dims: tuple[str, ...], row_bytes: int) -> None:
    if payloads.dtype != torch.uint8:
        raise ValueError(f"{name} is {payloads.dtype}; expected torch.uint8.")
    if payloads.dim() != len(dims) + 1 or payloads.shape[-1] < row_bytes:
        raise ValueError(f"{name} has shape {list(payloads.shape)}; expected [{', '.join(dims)}, at least {row_bytes} bytes].")
    _check_inner_dim(name, payloads)
    row_starts = [payloads.storage_offset(), *(payloads.stride(dim) for dim in range(len(dims)) if payloads.shape[dim] > 1)]
    if payloads.numel() and any(start % PART_ALIGNMENT_BYTES for start in row_starts):
        found = f"starts at byte {row_starts[0]} with strides {list(payloads.stride())}"
        raise ValueError(f"{name} {found}; expected rows that start at multiples of {PART_ALIGNMENT_BYTES} bytes.")


def _check_inner_dim(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {list(tensor.stride())}; expected a contiguous inner dim.")


def _check_rows_apart(name: str, written: Tensor) -> None:
    if written.shape[0] > 1 and written.stride(0) < written.shape[1]:
        found = f"shape {list(written.shape)} and strides {list(written.stride())}"
        raise ValueError(f"{name} has {found}; expected rows that do not overlap.")


def _check_has_members(payloads: Tensor) -> None:
    if payloads.shape[0] == 0:
        raise ValueError(f"payloads has shape {list(payloads.shape)}; expected at least one member.")


def _check_equal(name: str, found: int, needed: int) -> None:
    if found != needed:
        raise ValueError(f"{name}: {found}; expected {needed}.")


def _check_noise_key(noise_key: int | None) -> None:
    if noise_key is not None and not 0 <= noise_key < NOISE_KEYS:
        raise ValueError(f"noise_key is {noise_key}; expected None or 0 to {NOISE_KEYS - 1}.")


def _check_same_device(**tensors: Tensor) -> None:
    if len({tensor.device for tensor in tensors.values()}) > 1:
        found = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"{found}; expected one device.")
