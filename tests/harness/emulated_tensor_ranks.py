"""A GPT that tensor ranks share, all of them in one process and one graph, in fp64: what backward leaves on each rank.

It is written from the definition of tensor parallelism and reads no table. Each rank has leaves of its own, also for elements that others
have, too. What crosses the ranks is one of four functions of all ranks' tensors; without sequence parallelism every rank has all tokens
between the layers, with it only its own.

T tokens, H hidden size, R ranks; a list has one tensor per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.rotary import RotaryPositions

Leaves = Mapping[str, Tensor]


class _Copied(torch.autograd.Function):
    """The same values on every rank; each gets the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return (sum(grads),) * len(grads)  # type: ignore[return-value]


class _Reduced(torch.autograd.Function):
    """The sum on every rank; each passes on the gradient that it has."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.stack(parts).sum(0) for _ in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class _Gathered(torch.autograd.Function):
    """The tokens of all ranks on every rank; each gets its tokens of the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, *own: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat(own) for _ in own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return torch.stack(grads).sum(0).chunk(len(grads))


class _Scattered(torch.autograd.Function):
    """Each rank's tokens of the sum; every rank gets the gradients of all tokens."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in torch.stack(parts).sum(0).chunk(len(parts)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(grads),) * len(grads)


class _WholeRows(torch.autograd.Function):
    """The logits of all ranks on every rank; each gets the gradient of its own logits, which every rank computes alike."""

    @staticmethod
    def forward(ctx: Any, *own: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat(own, dim=-1) for _ in own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.chunk(len(grads), dim=-1)[rank] for rank, grad in enumerate(grads))


class EmulatedRanks:
    """leaves: the part of each rank in every parameter, by name."""

    def __init__(self, config: ModelConfig, leaves: Sequence[Leaves], *, sequence_parallel: bool) -> None:
        self.config = config
        self.leaves = leaves
        self.sequence_parallel = sequence_parallel

    def backward(self, tokens_T: Tensor, labels_T: Tensor) -> Tensor:
        """The loss of rank 0. Every rank's leaves have gradients afterwards."""
        enter, leave = (_Gathered, _Scattered) if self.sequence_parallel else (_Copied, _Reduced)
        hidden = leave.apply(*(self._embedded(rank, tokens_T) for rank in range(len(self.leaves))))
        for index in range(self.config.num_layers):
            for half in ("attention", "mlp"):
                path = f"blocks.{index}.{half}"
                entered = enter.apply(*self._each(self._norm, f"{path}_norm", hidden))
                sums = leave.apply(*self._each(self._attention if half == "attention" else self._mlp, path, entered))
                out = "projection" if half == "attention" else "down"
                hidden = [
                    before + added + leaves.get(f"{path}.{out}.bias", 0.0)
                    for before, added, leaves in zip(hidden, sums, self.leaves, strict=True)
                ]
        normed = enter.apply(*self._each(self._norm, "final.norm", hidden))
        head = "final.head.weight" if self.config.untie_embeddings_and_output_weights else "embedding.word.weight"
        logits = _WholeRows.apply(*(F.linear(values, leaves[head]) for values, leaves in zip(normed, self.leaves, strict=True)))
        losses = [F.cross_entropy(logits_TV, labels_T) for logits_TV in logits]
        torch.autograd.backward(losses)
        return losses[0].detach()

    def _each(self, function: Callable[[Leaves, str, Tensor], Tensor], path: str, values: Sequence[Tensor]) -> list[Tensor]:
        return [function(leaves, path, value) for leaves, value in zip(self.leaves, values, strict=True)]

    def _embedded(self, rank: int, tokens_T: Tensor) -> Tensor:
        """The rank's rows, and zeros for tokens and positions of other ranks."""
        found = _looked_up(self.leaves[rank]["embedding.word.weight"], tokens_T, rank)
        if self.config.learns_positions:
            found = found + _looked_up(self.leaves[rank]["embedding.position.weight"], torch.arange(tokens_T.numel()), rank)
        return found

    def _norm(self, leaves: Leaves, path: str, values: Tensor) -> Tensor:
        gain, width = leaves[f"{path}.weight"], values.shape[-1:]
        if self.config.normalization == "RMSNorm":
            return F.rms_norm(values, width, gain, self.config.norm_epsilon)
        return F.layer_norm(values, width, gain, leaves[f"{path}.bias"], self.config.norm_epsilon)

    def _attention(self, leaves: Leaves, path: str, values: Tensor) -> Tensor:
        """The rank's heads: its groups of queries, each with its key and value."""
        channels, ranks = self.config.kv_channels, len(self.leaves)
        groups = max(1, self.config.key_value_heads // ranks)
        rows = F.linear(values, leaves[f"{path}.qkv.weight"], leaves.get(f"{path}.qkv.bias"))
        heads = rows.unflatten(-1, (groups, -1, channels))
        query, key, value = heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]
        if self.config.qk_layernorm:
            query, key = self._norm(leaves, f"{path}.query_norm", query), self._norm(leaves, f"{path}.key_norm", key)
        if self.config.position_embedding_type == "rope":
            rotation = RotaryPositions(self.config).rotation(torch.arange(values.shape[0]), values.dtype)
            query, key = rotation.turned(query[None])[0], rotation.turned(key[None, :, :, None])[0, :, :, 0]
        scores = torch.einsum("tgmd,sgd->gmts", query, key) / channels**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("gmts,sgd->tgmd", scores.softmax(-1), value).flatten(1)
        return F.linear(mixed, leaves[f"{path}.projection.weight"])

    def _mlp(self, leaves: Leaves, path: str, values: Tensor) -> Tensor:
        inner = F.linear(values, leaves[f"{path}.up.weight"], leaves.get(f"{path}.up.bias"))
        if self.config.swiglu:
            gate, value = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * value
        else:
            inner = F.gelu(inner, approximate="tanh")
        return F.linear(inner, leaves[f"{path}.down.weight"])


def _looked_up(own_rows: Tensor, ids: Tensor, rank: int) -> Tensor:
    """The rows of `ids` that the rank has, and zeros."""
    local = ids - rank * own_rows.shape[0]
    is_own = (local >= 0) & (local < own_rows.shape[0])
    return own_rows[local.clamp(0, own_rows.shape[0] - 1)] * is_own[:, None]
