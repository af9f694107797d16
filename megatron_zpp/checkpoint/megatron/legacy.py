"""Reads Megatron-LM's format `torch`: mp_rank_XX[_YYY]/model_optim_rng.pt, one file of each tensor and pipeline rank.

A pipeline rank numbers its layers from 0, and with virtual stages it has several models. The model goes through the first model of each
pipeline rank, then through the second of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.megatron.names import FREQUENCIES
from megatron_zpp.checkpoint.megatron.pickled import members_of
from megatron_zpp.checkpoint.megatron.rank_file import RankFile
from megatron_zpp.checkpoint.megatron.source import (
    BLOCK,
    HEAD,
    MODEL_WEIGHTS,
    WORD,
    Source,
    StoredTensor,
    check_tensor_ranks,
    layers_of,
    named_here,
    number_of,
)
from megatron_zpp.system.user_error import UserError

FILE_NAMES = ("model_optim_rng.pt", "model_rng.pt")  # the second of 2022, beside a file of the distributed optimizer
_FOLDER = re.compile(r"mp_rank_(?P<tensor>[0-9]{2,3})(?:_(?P<pipeline>[0-9]{3}))?")


def read_legacy(folder: Path) -> Source:
    """The checkpoint in the folder. Raises UserError if files are missing or cannot be used."""
    files = {place: RankFile(path) for place, path in _paths(folder).items()}
    tensor_ranks, stages = (1 + max(ranks) for ranks in zip(*files, strict=True))
    for tensor in range(tensor_ranks):
        for stage in range(stages):
            if (tensor, stage) not in files:
                raise UserError(f"{folder} has no file of tensor rank {tensor}, pipeline rank {stage}; copy the whole checkpoint.")
    first = files[0, 0].members
    check_tensor_ranks(folder, tensor_ranks, members_of(first.get("args")))
    return Source(
        "Megatron-LM, torch",
        members_of(first.get("args")),
        number_of(first.get("iteration")),
        version_of(first),
        tuple(_whole_model([files[tensor, stage] for stage in range(stages)]) for tensor in range(tensor_ranks)),
        (MODEL_WEIGHTS,),
    )


def version_of(members: Mapping[str, Any]) -> float:
    """The generation of the order of rows. Files of before 2020 do not name theirs, which is 0."""
    version = members.get("checkpoint_version", 0)
    return float(version) if type(version) in (int, float) else -1.0


def shifted(named: Mapping[str, StoredTensor], first_layer: int) -> dict[str, StoredTensor]:
    """The same tensors; the layers, which count from 0, now count from `first_layer`."""
    return {BLOCK.sub(lambda found: f"blocks.{int(found[1]) + first_layer}.", name): tensor for name, tensor in named.items()}


def _paths(folder: Path) -> dict[tuple[int, int], Path]:
    paths = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _FOLDER.fullmatch(path.name)
        if match is None:
            raise UserError(f"{path} is of a model with experts or of an unknown format, which cannot be imported.")
        file = next((path / name for name in FILE_NAMES if (path / name).exists()), None)
        if file is None:
            raise UserError(f"{path} has no {FILE_NAMES[0]}; copy the whole checkpoint.")
        paths[int(match["tensor"]), int(match["pipeline"] or 0)] = file
    return paths


def _whole_model(stages: Sequence[RankFile]) -> dict[str, StoredTensor]:
    whole: dict[str, StoredTensor] = {}
    first_layer = 0
    for number, (file, model) in enumerate(_chunks(stages)):
        named = named_here(file.tensors(model), str(file.path))
        # The last stage may have the embedding again, as a tied head, and each stage the frequencies.
        copies = {WORD: HEAD, FREQUENCIES: f"{FREQUENCIES} {number}"}
        for name, tensor in shifted(named, first_layer).items():
            place = copies.get(name, name) if name in whole else name
            if place in whole:
                raise UserError(f"{tensor.where} is also {whole[place].where}; copy the whole checkpoint of one run.")
            whole[place] = tensor
        first_layer += layers_of(named)
    return whole


def _chunks(stages: Sequence[RankFile]) -> Iterator[tuple[RankFile, Any]]:
    if all("model" in stage.members for stage in stages):
        yield from ((stage, stage.members["model"]) for stage in stages)
        return
    number = 0
    while any(f"model{number}" in stage.members for stage in stages):
        yield from ((stage, stage.members.get(f"model{number}")) for stage in stages)
        number += 1
    if number == 0:
        raise UserError(f"{stages[0].path} has no model; choose a file that Megatron has written.")
