"""A checkpoint of weights alone, written by one process and one unit at a time: what converters make, and `--load` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.engine_state import versions
from megatron_zpp.checkpoint.folders import RELEASE, Stage, iteration_folder, move_latest, put_in_place, staged_folder
from megatron_zpp.checkpoint.manifest import CHUNK_BYTES, ELEMENT_TYPE, Manifest, StoredFile, StoredPiece
from megatron_zpp.checkpoint.owner import own_token
from megatron_zpp.checkpoint.unfinished import make_unfinished, seal, write_pieces
from megatron_zpp.parallel.specs import UnitSpec
from megatron_zpp.zero.pieces import WEIGHT, Piece


def write_release(
    directory: Path,
    units: Sequence[UnitSpec],
    weight_of: Callable[[str], Tensor],
    flags: Mapping[str, Any],
    *,
    iteration: int | None = None,
) -> Path:
    """The folder of the new checkpoint. weight_of: the whole parameter of a name, any shape, fp32.

    iteration: None for weights of no run, in the folder `release`, as Megatron has it.
    """
    final = directory / RELEASE if iteration is None else iteration_folder(directory, iteration)
    token = own_token()
    unfinished = staged_folder(final, Stage.UNFINISHED, token)
    make_unfinished(unfinished)
    files: list[StoredFile] = []
    pieces: list[StoredPiece] = []
    for index, unit in enumerate(units):
        file, stored = write_pieces(unfinished / f"unit_{index:05d}.safetensors", _pieces(unit, weight_of), CHUNK_BYTES)
        files.append(file)
        pieces += stored
    shapes = {param.name: param.shape for unit in units for param in unit.params}
    manifest = Manifest(iteration or 0, 0, shapes, {WEIGHT: ELEMENT_TYPE}, {}, flags, {}, versions())
    seal(unfinished, replace(manifest, files=tuple(files), pieces=tuple(pieces)))
    put_in_place(unfinished, final, token)
    move_latest(directory, RELEASE if iteration is None else str(iteration))
    return final


def _pieces(unit: UnitSpec, weight_of: Callable[[str], Tensor]) -> list[Piece]:
    pieces = []
    for param in unit.params:
        values = weight_of(param.name)
        if values.shape != param.shape:
            raise ValueError(f"{param.name} has shape {tuple(values.shape)} where the model has {param.shape}.")
        pieces.append(Piece(param.name, WEIGHT, 0, values.numel(), values.reshape(-1)))
    return pieces
