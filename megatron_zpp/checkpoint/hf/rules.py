"""How one tensor of ours stands in a layout of Hugging Face: alone, cut into several, or turned around."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig

HEAD = "lm_head.weight"  # of an untied model, in every layout


@dataclass(frozen=True)
class Boundaries:
    """The token ids that begin and end a document; None where there is none, or no tokenizer."""

    begin: int | None = None
    end: int | None = None

    def members(self) -> dict[str, int | None]:
        """Of their config.json. Where nothing else begins a document, the end of the one before does."""
        return {"bos_token_id": self.end if self.begin is None else self.begin, "eos_token_id": self.end}


@dataclass(frozen=True)
class Theirs:
    """The name and shape of one of their tensors."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorRule:
    """A parameter of ours and the tensors of theirs that hold it. split: ours to theirs, in their order. join: the reverse; both fp32."""

    ours: str
    theirs: tuple[Theirs, ...]
    split: Callable[[Tensor], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Tensor]


def whole(
    ours: str,
    theirs: str,
    shape: tuple[int, ...],
    to_theirs: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    to_ours: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> TensorRule:
    """A parameter that is one tensor there. shape: theirs."""
    return TensorRule(ours, (Theirs(theirs, shape),), lambda tensor: (to_theirs(tensor),), lambda parts: to_ours(parts[0]))


def vocabulary(ours: str, theirs: str, shape: tuple[int, int], padded_vocab_size: int) -> TensorRule:
    """The rows of the vocabulary without its padding."""
    return whole(ours, theirs, shape, lambda rows: rows[: shape[0]], lambda rows: padded_rows(rows, padded_vocab_size))


def norm(model: ModelConfig, ours: str, theirs: str, width: int) -> Iterator[TensorRule]:
    """Gain, and bias where there is one."""
    if model.apply_layernorm_1p:
        yield whole(f"{ours}.weight", f"{theirs}.weight", (width,), lambda gain: gain + 1, lambda gain: gain - 1)
    else:
        yield whole(f"{ours}.weight", f"{theirs}.weight", (width,))
    if model.normalization == "LayerNorm":
        yield whole(f"{ours}.bias", f"{theirs}.bias", (width,))


def padded_rows(rows_VH: Tensor, padded_vocab_size: int) -> Tensor:
    """The rows with their mean as padding.

    A row of zeros would get the logit 0, which in a trained model is far above those of real tokens; the mean row gets the mean logit, and
    so at most its share of the probability (Jensen's inequality).
    """
    missing = padded_vocab_size - rows_VH.shape[0]
    return rows_VH if missing == 0 else torch.cat([rows_VH, rows_VH.mean(0, keepdim=True).expand(missing, -1)])
