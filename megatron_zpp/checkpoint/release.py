"""Writes a checkpoint that holds only weights, in one process and one unit at a time. Converters use it; `--load` reads it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.engine_state import versions
from megatron_zpp.checkpoint.folders import (
    LATEST_FILE,
    RELEASE,
    Stage,
    move_latest,
    put_in_place,
    read_latest,
    saved_iterations,
    staged_folder,
)
from megatron_zpp.checkpoint.manifest import CHUNK_BYTES, ELEMENT_TYPE, Manifest, is_complete
from megatron_zpp.checkpoint.run_lock import Job, take_lock
from megatron_zpp.checkpoint.unfinished import Record, make_unfinished, seal, write_pieces
from megatron_zpp.parallel.specs import UnitSpec
from megatron_zpp.system.owner import own_token
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.pieces import Piece
from megatron_zpp.zero.policy import WEIGHT


def write_release(directory: Path, units: Sequence[UnitSpec], weight_of: Callable[[str], Tensor], flags: Mapping[str, Any]) -> Path:
    """Writes the checkpoint and returns its folder, named `release` as in Megatron.

    Raises FolderInUse if a run saves into the directory (--output), and UserError if a run or another program has saved there or
    a weight is not finite.
    weight_of: returns the full parameter of a name, fp32, in its shape.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = take_lock(directory, Job(flag="--output"), print)
    try:
        _check_place(directory)
        return _write(directory / RELEASE, units, weight_of, flags)
    finally:
        lock.release()


def _check_place(directory: Path) -> None:
    """Raises UserError if the new weights would come before the checkpoints of a run, or replace those of another program."""
    saved = saved_iterations(directory)
    if saved or read_latest(directory, "choose a new folder for --output.") not in (None, RELEASE):
        found = f"iteration {saved[-1]}" if saved else LATEST_FILE
        raise UserError(
            f"--output {directory} holds {found} of a run, which would go on from the new weights instead; choose a new folder."
        )
    release = directory / RELEASE
    if release.exists() and not is_complete(release):
        raise UserError(
            f"--output {directory} holds {RELEASE}, which is no checkpoint of this program and would be deleted; choose a new folder."
        )


def _write(final: Path, units: Sequence[UnitSpec], weight_of: Callable[[str], Tensor], flags: Mapping[str, Any]) -> Path:
    token = own_token()
    unfinished = staged_folder(final, Stage.UNFINISHED, token)
    make_unfinished(unfinished)
    try:
        _fill(unfinished, units, weight_of, flags)
        put_in_place(unfinished, final, token)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    move_latest(final.parent, RELEASE)
    return final


def _fill(unfinished: Path, units: Sequence[UnitSpec], weight_of: Callable[[str], Tensor], flags: Mapping[str, Any]) -> None:
    states = {WEIGHT: ELEMENT_TYPE}
    files = ((unfinished / f"unit_{index:05d}.safetensors", unit) for index, unit in enumerate(units))
    record = Record.joined([write_pieces(path, _pieces(unit, weight_of), states, CHUNK_BYTES) for path, unit in files])
    shapes = {param.name: param.whole_shape for unit in units for param in unit.params}
    manifest = Manifest(0, 0, shapes, states, {}, flags, {}, versions())
    seal(unfinished, replace(manifest, files=record.files, pieces=record.pieces))


def _pieces(unit: UnitSpec, weight_of: Callable[[str], Tensor]) -> list[Piece]:
    pieces = []
    for param in unit.params:
        values = weight_of(param.name)
        if values.shape != param.whole_shape:
            raise UserError(f"{param.name} has shape {tuple(values.shape)}, the model needs {param.whole_shape}.")
        if not all(math.isfinite(end.item()) for end in values.aminmax()):
            raise UserError(f"{param.name} has values that are NaN or infinite; choose a checkpoint from before the run went wrong.")
        pieces.append(Piece(param.name, WEIGHT, 0, values.numel(), values.reshape(-1)))
    return pieces
