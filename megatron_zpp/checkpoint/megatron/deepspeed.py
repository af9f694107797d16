"""Reads checkpoints of Megatron-DeepSpeed.

    mp_rank_TT_model_states.pt                   the whole model of tensor rank TT (--no-pipeline-parallel, ZeRO stages 0 to 2)
    layer_LL-model_TT-model_states.pt            one layer of the pipeline, and mp_rank_TT_model_states.pt without a model
    zero_pp_rank_D_mp_rank_TT_model_states.pt    ZeRO stage 3: see zero_3.py

A pipeline of DeepSpeed counts every stage of the model as a layer: the embedding, each transformer layer, the final norm, the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_zpp.checkpoint.megatron.legacy import version_of
from megatron_zpp.checkpoint.megatron.pickled import members_of
from megatron_zpp.checkpoint.megatron.rank_file import RankFile
from megatron_zpp.checkpoint.megatron.source import (
    MAIN_WEIGHTS,
    MODEL_WEIGHTS,
    Source,
    StoredTensor,
    check_tensor_ranks,
    named_here,
    number_of,
)
from megatron_zpp.checkpoint.megatron.zero_3 import MODEL_STATES, read_zero_3
from megatron_zpp.system.user_error import UserError

WHOLE = re.compile(r"mp_rank_(?P<tensor>[0-9]+)_model_states\.pt")
LAYER = re.compile(r"layer_(?P<layer>[0-9]+)-model_(?P<tensor>[0-9]+)-model_states\.pt")
EMBEDDING, BLOCK, HEAD = "word_embeddings.weight", "input_layernorm.weight", "lm_head.weight"  # in one file of a pipeline's layer each


def read_deepspeed(folder: Path) -> Source:
    """The checkpoint in the folder. Raises UserError if files are missing or cannot be used."""
    parted, whole, layers = (_by_tensor_rank(folder, pattern) for pattern in (MODEL_STATES, WHOLE, LAYER))
    if parted:
        firsts = [RankFile(paths[0]) for paths in parted]
        found = [read_zero_3(folder, file, rank) for rank, file in enumerate(firsts)]
        return _source(folder, "ZeRO stage 3", firsts[0], [named_here(names.items(), str(folder)) for names in found], MAIN_WEIGHTS)
    if not whole:
        raise UserError(f"{folder} has no mp_rank_00_model_states.pt; copy the whole checkpoint.")
    first = RankFile(whole[0][0])
    if layers:
        return _source(folder, "pipeline", first, [named_here(_pipeline(paths), str(folder)) for paths in layers], MODEL_WEIGHTS)
    files = [first, *(RankFile(paths[0]) for paths in whole[1:])]
    models = [named_here(file.tensors(file.members.get("module")), str(file.path)) for file in files]
    return _source(folder, "ZeRO stages 0 to 2", first, models, MODEL_WEIGHTS)


def _source(folder: Path, kind: str, first: RankFile, models: Sequence[Mapping[str, StoredTensor]], remark: str) -> Source:
    if "args" not in first.members:
        raise UserError(f"{folder} has no arguments of a run of Megatron-DeepSpeed; choose a checkpoint that it has written.")
    arguments, iteration = members_of(first.members["args"]), number_of(first.members.get("iteration"))
    check_tensor_ranks(folder, len(models), arguments)
    return Source(f"Megatron-DeepSpeed, {kind}", arguments, iteration, version_of(first.members), tuple(models), (remark,))


def _by_tensor_rank(folder: Path, pattern: re.Pattern[str]) -> list[list[Path]]:
    """The files of each tensor rank, in the order of their other number."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match is not None:
            numbers = match.groupdict()
            found.setdefault(int(numbers.pop("tensor")), []).append((int(next(iter(numbers.values()), 0)), path))
    if sorted(found) != list(range(len(found))):
        raise UserError(f"{folder} has files of tensor ranks {', '.join(map(str, sorted(found)))} only; copy the whole checkpoint.")
    return [[path for _, path in sorted(found[rank])] for rank in range(len(found))]


def _pipeline(paths: Sequence[Path]) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a pipeline's layers, under the names that they have in one model."""
    blocks = 0
    has_embedding = False
    for file in map(RankFile, paths):
        tensors = dict(file.tensors(file.file.root))
        if EMBEDDING in tensors and has_embedding:  # the tied head, beside positions that it does not use
            prefix, tensors = "", {"output_layer.weight": tensors[EMBEDDING]}
        elif EMBEDDING in tensors:
            prefix, has_embedding = "embedding.", True
        elif BLOCK in tensors:
            prefix = f"encoder.layers.{blocks}."
            blocks += 1
        elif HEAD in tensors:
            prefix, tensors = "", {"output_layer.weight": tensors.pop(HEAD), **tensors}
        else:
            prefix = "encoder.final_layernorm."
        yield from ((f"{prefix}{name}", tensor) for name, tensor in tensors.items())
