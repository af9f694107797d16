"""Flash attention inside documents, over runs of different lengths. Importing this file imports torch's compiler, which takes a second.

N query heads, K key and value heads, D channels of a head, R runs in all samples of the micro-batch; see document_attention.py.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.comm.pinned_memory import copied_to
from megatron_zpp.model.attention_kernel import repeated_heads


class VarlenDocuments:
    """Flash attention over runs of different lengths: no score between two documents is computed or kept."""

    def __init__(self, document_lengths_R: Tensor, device: torch.device) -> None:
        self._bounds = copied_to(device, F.pad(document_lengths_R.cumsum(0), (1, 0)).int())  # [R + 1] tokens
        self._longest = int(document_lengths_R.max())

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # every micro-batch has other lengths, and each would be compiled again
    def attend(self, query_BNSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, dropout: float) -> Tensor:
        if dropout > 0:
            raise RuntimeError("attention over runs of different lengths has no dropout; use MaskedDocuments")
        samples = query_BNSD.shape[0]
        if query_BNSD.shape[1] != key_BKSD.shape[1] and not _varlen_takes_shared_heads():
            key_BKSD, value_BKSD = repeated_heads(query_BNSD, key_BKSD, value_BKSD)
        query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query_BNSD, key_BKSD, value_BKSD))  # [B * S, N or K, D]
        mixed = _varlen_attention(query, key, value, self._bounds, self._longest)
        return mixed.unflatten(0, (samples, -1)).transpose(1, 2)


@cache
def varlen_function() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@cache
def _varlen_takes_shared_heads() -> bool:
    return "enable_gqa" in inspect.signature(varlen_function()).parameters


def _varlen_attention(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
    varlen = varlen_function()
    # Early versions of the function take `is_causal`, later ones a window: -1 is any number of tokens to the left, 0 none to the right.
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in inspect.signature(varlen).parameters else {"window_size": (-1, 0)}
    if query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    mixed: Tensor = varlen(query, key, value, bounds, bounds, longest, longest, **options)
    return mixed
