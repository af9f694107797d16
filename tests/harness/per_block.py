"""Block quantization once more, for tests: one block at a time, in numpy scalars, from the definition on paper."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LARGEST_CODE = {8: 127, 4: 7}
NAN_BITS = 0x7FC00000


def widened(values: Tensor) -> np.ndarray:
    """The same values in fp32, without torch's conversions."""
    if values.dtype == torch.bfloat16:
        return (values.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values.numpy().astype(np.float32)


def encoded_block(block: np.ndarray, bits: int) -> tuple[list[int], np.float32]:
    """Codes and scale of one block of fp32 values."""
    if not np.isfinite(block).all():
        return [0] * len(block), np.uint32(NAN_BITS).view(np.float32)
    largest_code = LARGEST_CODE[bits]
    with np.errstate(under="ignore"):
        scale = np.float32(np.max(np.abs(block))) / np.float32(largest_code)
        if scale == 0:
            return [0] * len(block), np.float32(0)
        codes = [int(np.rint(value / scale)) for value in block]
    return [max(-largest_code, min(largest_code, code)) for code in codes], scale


def encoded_row(values: np.ndarray, bits: int, block_numel: int) -> bytes:
    """Codes and scales of one payload row, the paddings between and behind them as zeros."""
    blocks = [encoded_block(block, bits) for block in values.reshape(-1, block_numel)]
    codes = [code for block_codes, _ in blocks for code in block_codes]
    if bits == 8:
        code_bytes = bytes(code % 256 for code in codes)
    else:
        code_bytes = bytes(low % 16 + 16 * (high % 16) for low, high in zip(codes[::2], codes[1::2], strict=True))
    scale_bytes = b"".join(scale.tobytes() for _, scale in blocks)
    return b"".join(part + bytes(-len(part) % 16) for part in (code_bytes, scale_bytes))


def decoded_row(row: bytes, row_numel: int, bits: int, block_numel: int) -> np.ndarray:
    """The fp32 values of one payload row."""
    codes_bytes = row_numel * bits // 8
    codes = []
    for byte in row[:codes_bytes]:
        parts = [byte] if bits == 8 else [byte % 16, byte // 16]
        codes += [part - 2**bits if part >= 2 ** (bits - 1) else part for part in parts]
    start = -(-codes_bytes // 16) * 16
    scales = np.frombuffer(row[start : start + row_numel // block_numel * 4], dtype="<f4")
    with np.errstate(all="ignore"):
        return np.array([np.float32(code) * scales[index // block_numel] for index, code in enumerate(codes)], dtype=np.float32)


def narrowed(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """fp32 values rounded to `dtype`, half to even, every NaN as the canonical one."""
    if dtype == torch.bfloat16:
        return torch.tensor([_bf16_bits(value) for value in values], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    with np.errstate(all="ignore"):
        narrow = torch.from_numpy(values.astype(np.float16 if dtype == torch.float16 else np.float32))
    narrow[narrow.isnan()] = float("nan")
    return narrow


def _bf16_bits(value: np.float32) -> int:
    if np.isnan(value):
        return 0x7FC0
    bits = int(value.view(np.uint32))
    below, rest = bits >> 16, bits & 0xFFFF
    is_up = rest > 0x8000 or (rest == 0x8000 and below % 2 == 1)
    return below + is_up


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; NaN and -0.0 count as their bits."""
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
