"""Gaussian codes of payload rows, 1 to 4 bits per value: encode, decode, and the mean that a descent needs.

Every 256 values of a row share one bf16 scale; they are rotated with random signs, then take levels placed for a Gaussian. A payload row:

    | scales bf16, padded to 16 bytes | codes | bytes of the caller, never touched |

Signs are drawn from a key, which encoding and decoding must have in common. In all functions, bits: 1, 2, 3 or 4; rounds: of rotation, 1
or 2; keys: 0 to 2**63 - 1. Two rounds leave no bias, whatever the values; one leaves some in blocks with few values that are not 0, with
less error there.

megatron_zpp.ops.gaussian_reference defines the arithmetic. The kernels of csrc/gaussian/ give the same bits; they run if they are loaded
and support the device. Every function raises ValueError for a wrong argument, naming what it found and what it expected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.ops import gaussian_reference
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
from megatron_zpp.ops.payload import GAUSSIAN_ROUNDS, gaussian_bytes


def encode_gaussian(values: Tensor, payloads: Tensor, *, bits: int, rounds: int, key: int) -> None:
    """Fills scales and codes of `payloads` [slices, >= gaussian_bytes] uint8 from `values` [slices, numel] fp32, bf16 or fp16.

    A block with a value that is not finite decodes to NaN as a whole, and so does one with values near the largest of fp32.
    """
    check_values("values", values, VALUE_DTYPES)
    slices, row_numel = values.shape
    check_payloads("payloads", payloads, ("slices",), gaussian_bytes(row_numel, bits))
    check_equal("slices of payloads", payloads.shape[0], slices)
    check_rows_apart("payloads", payloads)
    check_same_device(values=values, payloads=payloads)
    _check_rotation(rounds, [key])
    ops_for(payloads, gaussian_reference).encode_gaussian(values, payloads, bits, rounds, key)


def decode_gaussian(payloads: Tensor, values: Tensor, *, bits: int, rounds: int, keys: Sequence[int], accumulate: bool = False) -> None:
    """Fills `values` [slices, numel] fp32, bf16 or fp16 from `payloads` [slices, >= gaussian_bytes] uint8, or adds to them in fp32.

    keys: one for each slice.
    """
    check_values("values", values, VALUE_DTYPES)
    slices, row_numel = values.shape
    check_payloads("payloads", payloads, ("slices",), gaussian_bytes(row_numel, bits))
    check_equal("slices of payloads", payloads.shape[0], slices)
    check_equal("keys", len(keys), slices)
    check_rows_apart("values", values)
    check_same_device(payloads=payloads, values=values)
    _check_rotation(rounds, keys)
    ops_for(values, gaussian_reference).decode_gaussian(payloads, values, bits, rounds, keys, accumulate)


def decode_mean_gaussian(payloads: Tensor, mean: Tensor, *, bits: int, rounds: int, keys: Sequence[int], accumulate: bool) -> None:
    """Writes the mean over members of `payloads` to `mean` [slices, numel] fp32, or adds it.

    payloads: [members, slices, >= gaussian_bytes] uint8. keys: one for each member. Members 0, 1, ... are decoded and summed in fp32 in
    this order, then divided by their number.
    """
    check_values("mean", mean, (torch.float32,))
    slices, row_numel = mean.shape
    check_payloads("payloads", payloads, ("members", "slices"), gaussian_bytes(row_numel, bits))
    check_equal("slices of payloads", payloads.shape[1], slices)
    check_has_members(payloads)
    check_equal("keys", len(keys), payloads.shape[0])
    check_rows_apart("mean", mean)
    check_same_device(payloads=payloads, mean=mean)
    _check_rotation(rounds, keys)
    ops_for(mean, gaussian_reference).decode_mean_gaussian(payloads, mean, bits, rounds, keys, accumulate)


def _check_rotation(rounds: int, keys: Sequence[int]) -> None:
    if rounds not in GAUSSIAN_ROUNDS:
        raise ValueError(f"rounds is {rounds}; expected 1 or 2.")
    for key in keys:
        check_noise_key(key)
