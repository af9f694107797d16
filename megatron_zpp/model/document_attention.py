"""Causal attention inside documents, for samples that hold several documents.

B micro-batch size, S tokens per sample, N query heads, K key and value heads, D channels of a head, R runs in all samples of the
micro-batch. A run is the consecutive tokens of one document in one sample.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from megatron_zpp.comm.pinned_memory import copied_to
from megatron_zpp.model.attention_kernel import HeadShape, attend

LARGEST_VARLEN_CHANNELS = 256  # per head; must be a multiple of 8
# For values of about 1: a few roundings to 8 or 11 significant bits. Attention to another document would change them by about 1.
PROBE_TOLERANCE = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}


class Documents(Protocol):
    """The documents of one micro-batch, in the form that attention needs."""

    def attend(self, query_BNSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, dropout: float) -> Tensor:
        """mixed_BNSD: every token attends to itself and to the tokens before it in its document."""
        ...


def separated(document_lengths_R: Tensor, sample_shape: tuple[int, int], head: HeadShape, device: torch.device) -> Documents | None:
    """The documents on `device`; None if every sample is one document, so that plain causal attention is right.

    document_lengths_R: int64 on the host, the number of tokens of each run, sample after sample; their sum is B * S.
    """
    samples, length = sample_shape
    if int(document_lengths_R.sum()) != samples * length or len(document_lengths_R) < samples:
        raise RuntimeError(f"runs of {document_lengths_R.tolist()} tokens are not {samples} samples of {length}")
    if len(document_lengths_R) == samples:
        return None
    if has_varlen(device, head):
        from megatron_zpp.model.varlen_documents import VarlenDocuments  # imports the compiler

        return VarlenDocuments(document_lengths_R, device)
    return MaskedDocuments(document_lengths_R, sample_shape, head, device)


class MaskedDocuments:
    """One additive mask for all blocks: -inf for tokens of other documents and for later tokens. Any device, dtype and dropout."""

    def __init__(self, document_lengths_R: Tensor, sample_shape: tuple[int, int], head: HeadShape, device: torch.device) -> None:
        run_BS = copied_to(device, torch.repeat_interleave(document_lengths_R).view(sample_shape))
        is_future_SS = torch.ones(sample_shape[1], sample_shape[1], dtype=torch.bool, device=device).triu_(1)
        is_apart_B1SS = (run_BS[:, None, :, None] != run_BS[:, None, None, :]).logical_or_(is_future_SS)
        self._mask_B1SS = torch.zeros(is_apart_B1SS.shape, dtype=head.dtype, device=device).masked_fill_(is_apart_B1SS, -torch.inf)
        self._backend = head.backend

    def attend(self, query_BNSD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, dropout: float) -> Tensor:
        return attend(query_BNSD, key_BKSD, value_BKSD, dropout=dropout, backend=self._backend, mask_B1SS=self._mask_B1SS)


@cache
def has_varlen(device: torch.device, head: HeadShape) -> bool:
    """Whether this torch computes attention over runs of different lengths for such heads on this device. Tried once, against the mask."""
    fits = head.dtype in PROBE_TOLERANCE and head.channels % 8 == 0 and head.channels <= LARGEST_VARLEN_CHANNELS and not head.has_dropout
    fits = fits and head.backend in ("auto", "flash")
    if device.type != "cuda" or not fits:
        return False
    from megatron_zpp.model.varlen_documents import varlen_function

    if varlen_function() is None:
        return False
    try:
        return _agrees_with_mask(device, head)
    except (RuntimeError, NotImplementedError, TypeError):
        return False


def describe(device: torch.device, head: HeadShape, sample_shape: tuple[int, int]) -> str:
    """One sentence about how attention is kept inside documents."""
    if has_varlen(device, head):
        return "Attention stays inside documents: kernels for runs of different lengths (torch.nn.attention.varlen)."
    samples, length = sample_shape
    mebibytes = samples * length**2 * head.dtype.itemsize / 2**20
    return f"Attention stays inside documents: a mask of {mebibytes:.1f} MiB per micro-batch, which all blocks share."


def _agrees_with_mask(device: torch.device, head: HeadShape) -> bool:
    """Whether outputs and gradients over runs of 1, 40, 87 and 128 tokens equal those of the mask."""
    from megatron_zpp.model.varlen_documents import VarlenDocuments

    lengths, shape = torch.tensor([1, 40, 87, 128]), (2, 128)
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(shape[0], shape[1], 2, head.queries_per_group + 2, head.channels, generator=generator).to(device, head.dtype)
    results = []
    reference = MaskedDocuments(lengths, shape, replace(head, backend="auto"), device)  # flash accepts no mask
    with torch.enable_grad():
        for documents in (VarlenDocuments(lengths, device), reference):
            leaf = groups.clone().requires_grad_()
            parts = leaf.split((head.queries_per_group, 1, 1), dim=3)
            query_BNSD, key_BKSD, value_BKSD = (part.flatten(2, 3).transpose(1, 2) for part in parts)
            mixed = documents.attend(query_BNSD, key_BKSD, value_BKSD, 0.0)
            mixed.float().square().mean().backward()
            results.append((mixed.detach().float(), _scaled(leaf.grad)))
    tolerance = PROBE_TOLERANCE[head.dtype]
    return all(bool((one - other).abs().max() <= tolerance) for one, other in zip(*results, strict=True))


def _scaled(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise RuntimeError("attention gave its inputs no gradient")
    values = gradient.float()
    return values / values.abs().max()
