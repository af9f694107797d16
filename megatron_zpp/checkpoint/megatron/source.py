"""A checkpoint of Megatron in any format: the arguments of its run, and the tensors of each tensor rank by the names of this model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_zpp.checkpoint.megatron.names import is_no_weight, own_name
from megatron_zpp.config.counted import counted
from megatron_zpp.system.user_error import UserError

SHOWN_NAMES = 5
WORD = "embedding.word.weight"
HEAD = "final.head.weight"  # of a tied model, the copy of the embedding that the last pipeline rank has
BLOCK = re.compile(r"blocks\.([0-9]+)\.")  # begins the names of a layer
MAIN_WEIGHTS = "the weights are the fp32 ones of the optimizer"
MODEL_WEIGHTS = "the weights are those that the model computed with; no fp32 ones are stored under the names of parameters"


class StoredTensor(Protocol):
    """A tensor that is read when it is needed. where: its file and its name there."""

    @property
    def where(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Tensor:
        """The values in the dtype in which they are stored."""


@dataclass(frozen=True)
class Source:
    """A checkpoint of Megatron.

    kind: its format in words. arguments: of the run, inert records among them. ranks: for each tensor rank, the tensors by the names of
    this model. remarks: what whoever converts it should know.
    """

    kind: str
    arguments: Mapping[str, Any]
    iteration: int
    checkpoint_version: float
    ranks: tuple[Mapping[str, StoredTensor], ...]
    remarks: tuple[str, ...] = ()

    @property
    def consumed_samples(self) -> int:
        """Samples that the run had trained on. Its arguments hold them."""
        return number_of(self.arguments.get("consumed_train_samples"))


def check_tensor_ranks(folder: Path, ranks: int, arguments: Mapping[str, Any]) -> None:
    """Raises UserError if the folder has files of more or fewer tensor ranks than the run had."""
    stated = arguments.get("tensor_model_parallel_size", arguments.get("model_parallel_size", ranks))
    if ranks != stated:
        raise UserError(
            f"{folder} has files of {counted(ranks, 'tensor rank')}, its arguments say {number_of(stated)}; copy the whole checkpoint."
        )


def named_here(found: Iterable[tuple[str, StoredTensor]], place: str) -> dict[str, StoredTensor]:
    """The tensors by their names here. place: the file or folder, for messages.

    Raises UserError for a tensor that this model does not have, and for one that is there twice.
    """
    named: dict[str, StoredTensor] = {}
    foreign: list[str] = []
    for stored, tensor in found:
        name = own_name(stored)
        if name is None:
            foreign += [] if is_no_weight(stored) else [stored]
        elif name in named:
            raise UserError(f"{place} has {stored} twice under different names; choose another checkpoint.")
        else:
            named[name] = tensor
    if foreign:
        raise UserError(
            f"{place} has tensors that this model does not have, so it cannot be imported: {', '.join(sorted(foreign)[:SHOWN_NAMES])}."
        )
    return named


def layers_of(named: Mapping[str, StoredTensor]) -> int:
    """The number of layers, by the highest."""
    return max((int(found[1]) + 1 for found in map(BLOCK.match, named) if found), default=0)


def number_of(value: Any) -> int:
    """A whole number from a record; 0 for anything else."""
    return value if type(value) is int and 0 <= value < 2**63 else 0
