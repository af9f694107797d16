"""Block quantization of payload rows: encode, decode, and the means that descents need.

Every `block_numel` values of a row share one fp32 scale; codes have 8 or 4 bits (ZeRO++, arXiv 2306.10209). A payload row:

    | codes, padded to 16 bytes | scales fp32, padded to 16 bytes | bytes of the caller, never touched |

megatron_zpp.ops.reference defines the arithmetic. The kernels of csrc/ give the same bits; they run if they are loaded and support the
device. Every function raises ValueError for a wrong argument, naming what it found and what it expected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_zpp.ops import reference
from megatron_zpp.ops.checks import (
    VALUE_DTYPES,
    check_equal,
    check_has_members,
    check_noise_key,
    check_payloads,
    check_rows_apart,
    check_same_device,
    check_values,
)
from megatron_zpp.ops.extension import ops_for
from megatron_zpp.ops.payload import coded_bytes


def encode_blocks(
    values: Tensor, payloads: Tensor, *, bits: int, block_numel: int, rotated: bool = False, noise_key: int | None = None
) -> None:
    """Fills codes and scales of `payloads` [slices, >= coded_bytes] uint8 from `values` [slices, numel] fp32, bf16 or fp16.

    A block with a value that is not finite decodes to NaN.
    rotated: every 32 neighbours are rotated first; only decode_mean_blocks(rotated=True) restores the values.
    noise_key: 0 to 2**63 - 1. Codes are rounded up or down at random and without bias; the key and the value's index in `values` decide.
    None: codes are rounded to the nearest.
    """
    check_values("values", values, VALUE_DTYPES)
    slices, row_numel = values.shape
    check_payloads("payloads", payloads, ("slices",), coded_bytes(row_numel, bits, block_numel))
    check_equal("slices of payloads", payloads.shape[0], slices)
    check_rows_apart("payloads", payloads)
    check_same_device(values=values, payloads=payloads)
    check_noise_key(noise_key)
    ops_for(payloads, reference).encode_blocks(values, payloads, bits, block_numel, rotated, noise_key)


def decode_blocks(payloads: Tensor, values: Tensor, *, bits: int, block_numel: int) -> None:
    """Fills `values` [slices, numel] fp32, bf16 or fp16 from `payloads` [slices, >= coded_bytes] uint8."""
    check_values("values", values, VALUE_DTYPES)
    slices, row_numel = values.shape
    check_payloads("payloads", payloads, ("slices",), coded_bytes(row_numel, bits, block_numel))
    check_equal("slices of payloads", payloads.shape[0], slices)
    check_rows_apart("values", values)
    check_same_device(payloads=payloads, values=values)
    ops_for(values, reference).decode_blocks(payloads, values, bits, block_numel)


def decode_mean_blocks(payloads: Tensor, mean: Tensor, *, bits: int, block_numel: int, accumulate: bool, rotated: bool = False) -> None:
    """Writes the mean over members of `payloads` to `mean` [slices, numel] fp32, or adds it.

    payloads: [members, slices, >= coded_bytes] uint8. Members 0, 1, ... are summed in fp32 in this order, then divided by their number.
    rotated: the payloads hold rotated values, and the mean is rotated back.
    """
    check_values("mean", mean, (torch.float32,))
    slices, row_numel = mean.shape
    check_payloads("payloads", payloads, ("members", "slices"), coded_bytes(row_numel, bits, block_numel))
    check_equal("slices of payloads", payloads.shape[1], slices)
    check_has_members(payloads)
    check_rows_apart("mean", mean)
    check_same_device(payloads=payloads, mean=mean)
    ops_for(mean, reference).decode_mean_blocks(payloads, mean, bits, block_numel, accumulate, rotated)


def recode_mean_blocks(
    payloads: Tensor, recoded: Tensor, *, row_numel: int, bits: int, next_bits: int, block_numel: int, noise_key: int | None = None
) -> None:
    """Fills codes and scales of `recoded` with the mean over members of `payloads`, encoded with next_bits.

    payloads: [members, slices, >= coded_bytes] uint8. recoded: [slices, >= coded_bytes at next_bits] uint8.
    Gives the same bits as decode_mean_blocks into fp32, then encode_blocks with `noise_key`. If `payloads` are rotated, so is `recoded`.
    """
    check_payloads("payloads", payloads, ("members", "slices"), coded_bytes(row_numel, bits, block_numel))
    check_payloads("recoded", recoded, ("slices",), coded_bytes(row_numel, next_bits, block_numel))
    check_equal("slices of recoded", recoded.shape[0], payloads.shape[1])
    check_has_members(payloads)
    check_rows_apart("recoded", recoded)
    check_same_device(payloads=payloads, recoded=recoded)
    check_noise_key(noise_key)
    ops_for(recoded, reference).recode_mean_blocks(payloads, recoded, row_numel, bits, next_bits, block_numel, noise_key)
