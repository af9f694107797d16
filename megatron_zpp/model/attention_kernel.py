"""Calls torch's attention kernels, and selects the one that --attention-backend names.

B micro-batch size, S tokens per sample, N query heads, K key and value heads, D channels of a head.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.ops.device_kind import kind_of
from megatron_zpp.system.user_error import UserError

# In the order in which they are tried; the first that can run does.
KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}
NO_KERNEL = ("No available kernel", "No viable backend")  # what torch says if no kernel that it may use can run
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LARGEST_FLASH_CHANNELS = 256  # per head
FLASH_MAJOR = 8  # first major compute capability with flash attention: Ampere
# Where torch itself prefers cuDNN (2.10 and newer, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): Hopper and data-centre Blackwell.
CUDNN_MAJORS = (9, 10)
# cuDNN that torch prefers is newer than 9.15.0, which computes samples wrongly whose length is not a multiple of 128 (pytorch #169849).
NEWEST_BAD_CUDNN = 91500
CUDNN_TOKENS = 128


@dataclass(frozen=True)
class HeadShape:
    """The properties of heads that decide which kernel can run. has_dropout: of attention weights. backend: of --attention-backend."""

    dtype: torch.dtype
    channels: int
    has_dropout: bool
    queries_per_group: int = 1
    backend: str = "auto"


def queries_per_group(config: ModelConfig, head_ranks: int) -> int:
    """The query heads that share a key and value head on one of `head_ranks` ranks, among which the heads are divided."""
    return config.num_attention_heads // max(config.key_value_heads, head_ranks)


def head_shape_of(config: ModelConfig, dtype: torch.dtype, head_ranks: int) -> HeadShape:
    """The heads of a model that computes in `dtype`, on one of `head_ranks` ranks: tensor ranks times context ranks."""
    return HeadShape(
        dtype,
        config.kv_channels,
        has_dropout=config.attention_dropout > 0,
        queries_per_group=queries_per_group(config, head_ranks),
        backend=config.attention_backend,
    )


def attend(
    query_BNSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, *, dropout: float, backend: str, mask_B1SS: Tensor | None = None
) -> Tensor:
    """mixed_BNSD, computed by the kernel that --attention-backend names; causal unless there is a mask.

    Recent versions of torch prefer cuDNN on Hopper and Blackwell. Faults are known there: NaN gradients under a mask (trl #7181), wrong
    results on Blackwell with shared key and value heads (pytorch #193893), and others with samples whose length is not a multiple of 128.
    So `auto` leaves cuDNN out, except for plain causal attention on Hopper. On an H100 it is faster there than flash.
    mask_B1SS: added to the scores. Raises RuntimeError if no such kernel can run; `check_attention` finds that out at start-up.
    """
    shares_heads = query_BNSD.shape[1] != key_BKSD.shape[1]
    if shares_heads and not _takes_shared_heads(query_BNSD, backend, has_mask=mask_B1SS is not None):
        key_BKSD, value_BKSD = repeated_heads(query_BNSD, key_BKSD, value_BKSD)
        shares_heads = False
    is_plain = mask_B1SS is None and dropout == 0.0 and not shares_heads and query_BNSD.shape[2] % CUDNN_TOKENS == 0
    if query_BNSD.is_meta:
        return _planned(query_BNSD, key_BKSD, value_BKSD, dropout, backend, mask_B1SS)
    kernels = kernel_order(query_BNSD.device, backend, is_plain=is_plain, has_mask=mask_B1SS is not None)
    with nullcontext() if kernels is None else sdpa_kernel(kernels, set_priority=len(kernels) > 1):
        return F.scaled_dot_product_attention(
            query_BNSD,
            key_BKSD,
            value_BKSD,
            attn_mask=mask_B1SS,
            dropout_p=dropout,
            is_causal=mask_B1SS is None,
            enable_gqa=shares_heads,
        )


def _planned(query_BNSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, dropout: float, backend: str, mask_B1SS: Tensor | None) -> Tensor:
    """mixed_BNSD on the meta device, where torch itself would take plain products: by the kernel that is expected on the planned device.

    On GPUs this is flash attention where it can run, otherwise efficient attention; cuDNN keeps what flash keeps.
    """
    is_causal = mask_B1SS is None
    if backend in ("unfused", "local") or (kind_of("meta") == "cpu" and dropout > 0):
        shares_heads = query_BNSD.shape[1] != key_BKSD.shape[1]
        if kind_of("meta") == "cpu" or dropout == 0.0:
            return F.scaled_dot_product_attention(
                query_BNSD, key_BKSD, value_BKSD, mask_B1SS, dropout, is_causal=is_causal, enable_gqa=shares_heads
            )
        if shares_heads:
            key_BKSD, value_BKSD = repeated_heads(query_BNSD, key_BKSD, value_BKSD)
        return _products_with_dropout(query_BNSD, key_BKSD, value_BKSD, dropout, mask_B1SS)
    kernels, heads = torch.ops.aten, (query_BNSD, key_BKSD, value_BKSD)
    mixed_BNSD: Tensor
    if kind_of("meta") == "cpu":
        mixed_BNSD, _ = kernels._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, is_causal, attn_mask=mask_B1SS)
    elif is_causal and backend != "fused" and query_BNSD.dtype in (torch.bfloat16, torch.float16):
        mixed_BNSD = kernels._scaled_dot_product_flash_attention(*heads, dropout, is_causal)[0]
    else:
        mixed_BNSD = kernels._scaled_dot_product_efficient_attention(*heads, mask_B1SS, True, dropout, is_causal)[0]
    return mixed_BNSD


def _products_with_dropout(query_BNSD: Tensor, key_BNSD: Tensor, value_BNSD: Tensor, dropout: float, mask_B1SS: Tensor | None) -> Tensor:
    """mixed_BNSD as torch's plain products make it on a GPU, where one byte of each score says whether it was dropped.

    On the meta device torch itself would keep a number in its place. Queries and keys are scaled, and 16-bit values multiplied in fp32.
    """
    query, key, value = (heads.float() for heads in (query_BNSD * 1.0, key_BNSD * 1.0, value_BNSD))
    scores_BNSS = query @ key.transpose(-2, -1)
    scores_BNSS += torch.empty_like(scores_BNSS[0, 0]) if mask_B1SS is None else mask_B1SS.float()
    kept_BNSS, _ = torch.native_dropout(torch.softmax(scores_BNSS, -1), dropout, True)
    return (kept_BNSS @ value).to(query_BNSD.dtype)


def kernel_order(device: torch.device, backend: str, *, is_plain: bool, has_mask: bool) -> list[SDPBackend] | None:
    """The kernels that torch may use, in the order in which it tries them; None for torch's own, which begins with flash on GPUs.

    is_plain: causal, without dropout, no heads are shared, and the tokens are a multiple of CUDNN_TOKENS.
    """
    if backend == "fused" and has_mask:
        return [SDPBackend.EFFICIENT_ATTENTION]
    if backend != "auto":
        return KERNELS[backend]
    if device.type != "cuda" or not _torch_may_prefer_cudnn(device):
        return None
    return [SDPBackend.CUDNN_ATTENTION, *WITHOUT_CUDNN] if is_plain and _trusts_cudnn(device) else WITHOUT_CUDNN


def _torch_may_prefer_cudnn(device: torch.device) -> bool:
    """Whether torch's own order may begin with cuDNN here. In deterministic mode torch never uses it."""
    return torch.cuda.get_device_properties(device).major in CUDNN_MAJORS and not torch.are_deterministic_algorithms_enabled()


def _trusts_cudnn(device: torch.device) -> bool:
    """Whether no fault of plain causal attention is known of this device with this cuDNN."""
    version = torch.backends.cudnn.version() or 0
    return torch.cuda.get_device_properties(device).major == CUDNN_MAJORS[0] and version > NEWEST_BAD_CUDNN


def take_as_constants() -> None:
    """Tells torch.compile that what is found out about a device does not change; call it before something is compiled.

    A decorator would do it wherever this file is imported, and would import the compiler for it.
    """
    for found_out in (_torch_may_prefer_cudnn, _trusts_cudnn):
        torch.compiler.assume_constant_result(found_out)


def repeated_heads(query_BNSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value, both [B, N, S, D]: each head is repeated for all query heads that share it."""
    times = query_BNSD.shape[1] // key_BKSD.shape[1]
    return key_BKSD.repeat_interleave(times, dim=1), value_BKSD.repeat_interleave(times, dim=1)


def check_attention(device: torch.device, head: HeadShape, *, masks_documents: bool) -> None:
    """Raises UserError if the chosen kernel cannot run on this device with such heads; it is tried once, forward and backward.

    If the kernel has failed, rather than torch having none, its error is the cause of the UserError.
    """
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
    except RuntimeError as error:
        wish = f"heads of {head.channels} channels in {str(head.dtype).removeprefix('torch.')}"
        wish += ", with --attention-dropout" if head.has_dropout else ""
        wish += ", with the mask of --reset-attention-mask" if masks_documents else ""
        is_missing = any(text in str(error) for text in NO_KERNEL)
        first_line = str(error).partition("\n")[0]
        trouble = f"has no kernel on {device.type}" if is_missing else f"fails on {device.type} with '{first_line}'"
        cause = None if is_missing else error
        raise UserError(f"--attention-backend {head.backend} {trouble} for {wish}; choose --attention-backend auto.") from cause


def _takes_shared_heads(query_BNSD: Tensor, backend: str, *, has_mask: bool) -> bool:
    """Whether torch takes fewer key heads than query heads here. Of the fast kernels on GPUs only flash does, and only without a mask."""
    kind = kind_of(query_BNSD.device.type)
    if kind == "cpu" or backend in ("unfused", "local"):
        return True
    fits = query_BNSD.dtype in (torch.bfloat16, torch.float16) and query_BNSD.shape[-1] <= LARGEST_FLASH_CHANNELS
    if not fits or has_mask or backend not in ("auto", "flash"):
        return False
    if query_BNSD.is_meta:
        return True
    # torch.compile treats this call as a constant, unlike get_device_capability.
    return torch.cuda.get_device_properties(query_BNSD.device).major >= FLASH_MAJOR
