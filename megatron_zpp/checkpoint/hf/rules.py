"""Rules that convert one of our parameters to tensors of a Hugging Face layout and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig

HEAD = "lm_head.weight"  # of an untied model, in every layout
COMPARED_NUMEL = 1 << 22  # of a part of two tensors, so that a comparison needs little memory beside them


@dataclass(frozen=True)
class Boundaries:
    """The token ids that begin and end a document, and that fill a batch; None without a tokenizer, or if it has no such token.

    If no token begins a document, the end of the previous document does.
    """

    begin: int | None = None
    end: int | None = None
    pad: int | None = None

    def members(self) -> dict[str, int | None]:
        """The entries of config.json, from which transformers also takes those of its generation_config.json."""
        return {f"{name}_id": token_id for name, token_id in self.named().items()}

    def named(self) -> dict[str, int | None]:
        """The ids by their names in tokenizer_config.json."""
        return {"bos_token": self.end if self.begin is None else self.begin, "eos_token": self.end, "pad_token": self.pad}


@dataclass(frozen=True)
class HfTensor:
    """The name and shape of a tensor in Hugging Face's files."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Buffer:
    """A tensor that is not imported, because config.json alone determines it.

    ending: of its name. rule: what it is, in words. holds: whether a tensor is that for a model.
    """

    ending: str
    rule: str
    holds: Callable[[ModelConfig, Tensor], bool]


@dataclass(frozen=True)
class TensorRule:
    """One of our parameters, and the tensors of Hugging Face that hold its values.

    split: converts the parameter to the tensors, in the order of hf_tensors. join: converts them back. Both work in fp32.
    """

    parameter: str
    hf_tensors: tuple[HfTensor, ...]
    split: Callable[[Tensor], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Tensor]


def one_tensor(
    name: str,
    hf_name: str,
    hf_shape: tuple[int, ...],
    to_hf: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    from_hf: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> TensorRule:
    """The rule for a parameter that is one tensor in Hugging Face's files."""
    return TensorRule(name, (HfTensor(hf_name, hf_shape),), lambda tensor: (to_hf(tensor),), lambda parts: from_hf(parts[0]))


def vocabulary(name: str, hf_name: str, shape: tuple[int, int], padded_vocab_size: int) -> TensorRule:
    """The rule for rows of the vocabulary, which Hugging Face stores without padding."""
    return one_tensor(name, hf_name, shape, lambda rows: rows[: shape[0]], lambda rows: padded_rows(rows, padded_vocab_size))


def norm(model: ModelConfig, name: str, hf_name: str, width: int) -> Iterator[TensorRule]:
    """The rules for the gain of a norm, and for its bias if it has one."""
    if model.apply_layernorm_1p:
        yield one_tensor(f"{name}.weight", f"{hf_name}.weight", (width,), lambda gain: gain + 1, lambda gain: gain - 1)
    else:
        yield one_tensor(f"{name}.weight", f"{hf_name}.weight", (width,))
    if model.normalization == "LayerNorm":
        yield one_tensor(f"{name}.bias", f"{hf_name}.bias", (width,))


def padded_rows(rows_VH: Tensor, padded_vocab_size: int) -> Tensor:
    """The rows, padded with their mean.

    A row of zeros would get the logit 0, which in a trained model is far above the logits of real tokens. The mean row gets the mean logit,
    and so at most an average share of the probability (Jensen's inequality).
    """
    missing = padded_vocab_size - rows_VH.shape[0]
    return rows_VH if missing == 0 else torch.cat([rows_VH, rows_VH.mean(0, keepdim=True).expand(missing, -1)])


def compared_rows(shape: Sequence[int]) -> int:
    """Rows of a part of a tensor of this shape."""
    return max(1, COMPARED_NUMEL // max(1, math.prod(shape[1:])))


def largest_difference(parts: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference between values of two tensors, which come in pairs of parts of one shape. NaN if a difference is NaN."""
    largest = torch.zeros(())
    for one, other in parts:
        largest = torch.maximum(largest, (one.float() - other.float()).abs().max())
    return largest.item()
