"""The fp32 weights of DeepSpeed's ZeRO stage 3, whose ranks D have equal parts of every parameter.

    zero_pp_rank_D_mp_rank_TT_model_states.pt    names and shapes of the parameters of tensor rank TT, in order
    zero_pp_rank_D_mp_rank_TT_optim_states.pt    groups of values, which are one after the other: the part of rank D of each parameter

The part of a parameter is its numel / ranks, rounded up. What the last ranks have beyond its numel is padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.megatron.pickled import Global, Made, members_of
from megatron_zpp.checkpoint.megatron.rank_file import FileTensor, RankFile
from megatron_zpp.checkpoint.megatron.source import StoredTensor
from megatron_zpp.checkpoint.megatron.torch_file import counts_of
from megatron_zpp.system.user_error import UserError

MODEL_STATES = re.compile(r"zero_pp_rank_(?P<data>[0-9]+)_mp_rank_(?P<tensor>[0-9]+)_model_states\.pt")
OPTIMIZER_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<data>[0-9]+)_mp_rank_(?P<tensor>[0-9]+)_optim_states\.pt")

STAGE, STAGE_3 = "deepspeed.runtime.zero.config.ZeroStageEnum", "weights"


@dataclass(frozen=True)
class FlatGroups:
    """The values of one rank. ends: of each group, counted from the first value of all."""

    groups: Sequence[FileTensor]
    ends: Sequence[int]

    def read(self, start: int, stop: int) -> Tensor:
        parts = []
        for group, end in zip(self.groups, self.ends, strict=True):
            begin = end - group.shape[0]
            if begin < stop and start < end:
                parts.append(group.part(max(start, begin) - begin, min(stop, end) - begin).read())
        return torch.cat(parts)


@dataclass(frozen=True)
class PartedTensor:
    """A parameter of which each of the ranks has `part_numel` values from `start` on."""

    where: str
    shape: tuple[int, ...]
    ranks: Sequence[FlatGroups]
    start: int

    @property
    def part_numel(self) -> int:
        return -(-math.prod(self.shape) // len(self.ranks))

    def read(self) -> Tensor:
        parts = [rank.read(self.start, self.start + self.part_numel) for rank in self.ranks]
        return torch.cat(parts)[: math.prod(self.shape)].reshape(self.shape)


def read_zero_3(folder: Path, first: RankFile, tensor_rank: int) -> dict[str, StoredTensor]:
    """The parameters of a tensor rank by DeepSpeed's names. first: model states of its first rank. Raises UserError for missing files."""
    ranks = [_flat_groups(path) for path in _of_tensor_rank(folder, tensor_rank)]
    named: dict[str, StoredTensor] = {}
    start = 0
    for name, shape in _shapes(first):
        tensor = PartedTensor(f"{name} in {first.path}", shape, ranks, start)
        named[name] = tensor
        start += tensor.part_numel
    if any(rank.ends[-1] != start for rank in ranks):
        raise UserError(f"{folder} has other numbers of values than the parameters of {first.path.name} need; copy the whole checkpoint.")
    return named


def _of_tensor_rank(folder: Path, tensor_rank: int) -> list[Path]:
    paths = {}
    for path in folder.iterdir():
        match = OPTIMIZER_STATES.fullmatch(path.name)
        if match is not None and int(match["tensor"]) == tensor_rank:
            paths[int(match["data"])] = path
    if sorted(paths) != list(range(len(paths))) or not paths:
        raise UserError(f"{folder} lacks files zero_pp_rank_*_mp_rank_{tensor_rank:02d}_optim_states.pt; copy the whole checkpoint.")
    return [paths[rank] for rank in range(len(paths))]


def _flat_groups(path: Path) -> FlatGroups:
    file = RankFile(path)
    states = members_of(file.members.get("optimizer_state_dict"))
    records = states.get("fp32_flat_groups")
    if not _is_stage_3(states.get("zero_stage")) or not isinstance(records, list) or not records:
        raise UserError(f"{path} has no fp32_flat_groups of ZeRO stage 3; choose a checkpoint that DeepSpeed has written.")
    groups = []
    for index, record in enumerate(records):
        place = file.file.place_of(record)
        if place is None or len(place.shape) != 1:
            raise UserError(f"{path} has fp32_flat_groups that are not flat; choose a checkpoint that DeepSpeed has written.")
        groups.append(FileTensor(file.file, f"fp32_flat_groups[{index}]", place))
    return FlatGroups(groups, list(accumulate(group.shape[0] for group in groups)))


def _is_stage_3(record: Any) -> bool:
    """Whether it is 3, or the member of DeepSpeed's enumeration, which Python 3.11.0 to 3.11.3 store by its name, others by its value."""
    if not isinstance(record, Made):
        return type(record) is int and record == 3
    if record.is_made_by(STAGE):
        return record.arguments == (3,)
    is_by_name = any(record.is_made_by(f"{module}.getattr") for module in ("builtins", "__builtin__"))
    if not is_by_name or not isinstance(record.arguments, tuple) or len(record.arguments) != 2:
        return False
    kind, name = record.arguments
    return isinstance(kind, Global) and str(kind) == STAGE and name == STAGE_3


def _shapes(file: RankFile) -> Iterator[tuple[str, tuple[int, ...]]]:
    found = file.members.get("param_shapes")
    for group in found if isinstance(found, list) else [found]:
        for name, record in members_of(group).items():
            shape = counts_of(record)
            if shape is None:
                raise UserError(f"{file.path} describes {name} without its shape; choose a checkpoint that DeepSpeed has written.")
            yield name, shape
