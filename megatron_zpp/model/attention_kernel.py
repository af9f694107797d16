"""Calls torch's attention kernels, and selects the one that --attention-backend names.

B micro-batch size, S tokens per sample, N query heads, K key and value heads, D channels of a head.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_zpp.config.schema import ModelConfig

KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}
LARGEST_FLASH_CHANNELS = 256  # per head
FLASH_MAJOR = 8  # first major compute capability with flash attention: Ampere


@dataclass(frozen=True)
class HeadShape:
    """The properties of heads that decide which kernel can run. has_dropout: of attention weights. backend: of --attention-backend."""

    dtype: torch.dtype
    channels: int
    has_dropout: bool
    queries_per_group: int = 1
    backend: str = "auto"


def head_shape_of(config: ModelConfig, dtype: torch.dtype) -> HeadShape:
    """The heads of a model that computes in `dtype`."""
    return HeadShape(
        dtype,
        config.kv_channels,
        has_dropout=config.attention_dropout > 0,
        queries_per_group=config.num_attention_heads // config.key_value_heads,
        backend=config.attention_backend,
    )


def attend(
    query_BNSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, *, dropout: float, backend: str, mask_B1SS: Tensor | None = None
) -> Tensor:
    """mixed_BNSD, computed by the kernel that --attention-backend names; causal unless there is a mask.

    mask_B1SS: added to the scores. Raises RuntimeError if no such kernel can run; `check_attention` finds that out at start-up.
    """
    shares_heads = query_BNSD.shape[1] != key_BKSD.shape[1]
    if shares_heads and not _takes_shared_heads(query_BNSD, backend, has_mask=mask_B1SS is not None):
        key_BKSD, value_BKSD = repeated_heads(query_BNSD, key_BKSD, value_BKSD)
        shares_heads = False
    with _only(backend):
        return F.scaled_dot_product_attention(
            query_BNSD,
            key_BKSD,
            value_BKSD,
            attn_mask=mask_B1SS,
            dropout_p=dropout,
            is_causal=mask_B1SS is None,
            enable_gqa=shares_heads,
        )


def repeated_heads(query_BNSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value, both [B, N, S, D]: each head is repeated for all query heads that share it."""
    times = query_BNSD.shape[1] // key_BKSD.shape[1]
    return key_BKSD.repeat_interleave(times, dim=1), value_BKSD.repeat_interleave(times, dim=1)


def check_attention(device: torch.device, head: HeadShape, *, masks_documents: bool) -> None:
    """Raises ValueError if the chosen kernel cannot run on this device with such heads; it is tried once, forward and backward."""
    if head.backend == "auto":
        return
    query = torch.zeros(1, 2 * head.queries_per_group, 16, head.channels, dtype=head.dtype, device=device, requires_grad=True)
    key = torch.zeros(1, 2, 16, head.channels, dtype=head.dtype, device=device, requires_grad=True)
    mask = torch.zeros(1, 1, 16, 16, dtype=head.dtype, device=device) if masks_documents else None
    dropout = 0.5 if head.has_dropout else 0.0
    try:
        with warnings.catch_warnings(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            warnings.simplefilter("ignore")  # torch warns about every kernel that it was not allowed to use
            attend(query, key, key, dropout=dropout, backend=head.backend, mask_B1SS=mask).sum().backward()
    except RuntimeError:
        wish = f"heads of {head.channels} channels in {str(head.dtype).removeprefix('torch.')}"
        wish += ", with --attention-dropout" if head.has_dropout else ""
        wish += ", with the mask of --reset-attention-mask" if masks_documents else ""
        raise ValueError(
            f"--attention-backend {head.backend} has no kernel on {device.type} for {wish}; choose --attention-backend auto."
        ) from None


def _only(backend: str) -> AbstractContextManager[None]:
    return nullcontext() if backend == "auto" else sdpa_kernel(KERNELS[backend])


def _takes_shared_heads(query_BNSD: Tensor, backend: str, *, has_mask: bool) -> bool:
    """Whether torch takes fewer key heads than query heads here. Of the fast kernels on GPUs only flash does, and only without a mask."""
    if query_BNSD.device.type == "cpu" or backend in ("unfused", "local"):
        return True
    fits = query_BNSD.dtype in (torch.bfloat16, torch.float16) and query_BNSD.shape[-1] <= LARGEST_FLASH_CHANNELS
    return fits and not has_mask and backend in ("auto", "flash") and _has_flash(query_BNSD.device)


def _has_flash(device: torch.device) -> bool:
    # torch.compile treats this call as a constant, unlike get_device_capability.
    return torch.cuda.get_device_properties(device).major >= FLASH_MAJOR
