"""What block quantization does to values, from its definition and in numpy, and how far it may move them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ROUNDOFF = 2.0**-24  # of fp32


def largest_code(bits: int) -> int:
    return {8: 127, 4: 7}[bits]


def after_blocks(values: Tensor, bits: int, block_numel: int) -> Tensor:
    """fp32 in the shape of `values`: what is left of them after codes of `bits` bits with one scale per `block_numel` values in a row."""
    blocks = values.float().numpy().reshape(-1, block_numel)
    limit = np.float32(largest_code(bits))
    with np.errstate(all="ignore"):
        scales = np.abs(blocks).max(1, keepdims=True) / limit
        scales[~np.isfinite(scales)] = np.nan
        codes = np.where(scales > 0, np.clip(np.rint(blocks / scales), -limit, limit), np.float32(0))
        decoded = codes * scales
    return torch.from_numpy(decoded).view(values.shape)


def worst_error(values: Tensor, bits: int, block_numel: int) -> Tensor:
    """fp64, by element: how far its decoded value may be away.

    Half a step, with a step of max|x| / Q; scale, quotient and product are rounded once each, quotient and product at up to Q steps.
    """
    limit = largest_code(bits)
    largest = values.double().abs().view(-1, block_numel).amax(1, keepdim=True)
    half_step = largest / (2 * limit) * (1 + (4 * limit + 4) * ROUNDOFF)
    return half_step.expand(-1, block_numel).reshape(values.shape)


def hadamard() -> Tensor:
    """fp64 [32, 32], the fivefold Kronecker product of [[1, 1], [1, -1]]."""
    matrix = np.ones((1, 1))
    for _ in range(5):
        matrix = np.kron(matrix, np.array([[1.0, 1.0], [1.0, -1.0]]))
    return torch.from_numpy(matrix)


def rotated(values: Tensor) -> Tensor:
    """fp64 in the shape of `values`: every 32 values in a row times the Hadamard matrix."""
    return (values.double().reshape(-1, 32) @ hadamard()).view(values.shape)


def roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2
