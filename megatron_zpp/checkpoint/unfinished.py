"""The folder of a save in progress: created by rank 0, filled by every rank, and sealed when it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron_zpp.checkpoint.durable import SHARED_FOLDER, becomes_visible, write_durably
from megatron_zpp.checkpoint.folders import Stage, delete_or_restore, left_latest_files, leftovers
from megatron_zpp.checkpoint.manifest import (
    MANIFEST_BYTES,
    MANIFEST_FILE,
    MARKER_FILE,
    CheckpointError,
    Manifest,
    StoredFile,
    StoredPiece,
    file_of,
    marker_json,
    members_of,
    piece_of,
)
from megatron_zpp.checkpoint.shard_file import DTYPES, TensorEntry, lay_out, write_file
from megatron_zpp.parallel.stripes import Columns
from megatron_zpp.system.output_file import sync_folder
from megatron_zpp.system.outside import OutsideFile
from megatron_zpp.system.owner import is_abandoned, own_token
from megatron_zpp.zero.pieces import Piece

SPARE_BYTES = 1 << 20  # for the manifest and other small files


def make_unfinished(folder: Path) -> None:
    """Deletes the leftovers of dead runs, or restores the only complete copy among them; then creates the folder of a new save."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = own_token()
    for leftover in leftovers(folder.parent):
        # What this process left half replaced or half deleted is from an earlier save, because one runs at a time.
        is_own = leftover.token == own and leftover.stage is not Stage.UNFINISHED
        if is_own or is_abandoned(leftover.folder, leftover.token):
            delete_or_restore(leftover)
    for path, token in left_latest_files(folder.parent):
        if is_abandoned(path, token):
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # left by a failed save of this process
    folder.mkdir()
    sync_folder(folder.parent)


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raises CheckpointError if this rank does not see the folder, or if its disk has no room for the full checkpoint."""
    if not becomes_visible(folder):
        raise CheckpointError(f"rank 0 has created {folder}, which does not exist on this rank's machine; {SHARED_FOLDER}")
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"the checkpoint takes {_in_gib(needed_bytes)} and {folder.parent} has {_in_gib(free_bytes)} left; "
            "free some, keep fewer checkpoints (--keep-last), or choose another folder (--save)"
        )


def _in_gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f} GiB"


def write_pieces(path: Path, pieces: Sequence[Piece], states: Mapping[str, str], chunk_bytes: int) -> tuple[StoredFile, list[StoredPiece]]:
    """Writes a file of one-dimensional tensors named `<parameter>.<state>.<start>`. Returns the entries of the manifest for it.

    states: element type of each state. Frozen weights are widened to it. Raises RuntimeError if values of a piece would be rounded.
    """
    for piece in pieces:
        if torch.promote_types(piece.values.dtype, DTYPES[states[piece.state]]) != DTYPES[states[piece.state]]:
            raise RuntimeError(f"{piece.parameter} ({piece.state}) is {piece.values.dtype}, its manifest says {states[piece.state]}")
    ordered = sorted(pieces, key=lambda piece: -DTYPES[states[piece.state]].itemsize)  # each begins at a multiple of its elements' bytes
    layout = lay_out([TensorEntry(_tensor_name(piece), states[piece.state], (piece.stop - piece.start,)) for piece in ordered])
    file = write_file(path, layout, (piece.values.to(DTYPES[states[piece.state]]) for piece in ordered), chunk_bytes)
    offsets: dict[tuple[str, int, int, Columns | None], dict[str, int]] = {}
    for piece, offset in zip(ordered, layout.offsets, strict=True):
        offsets.setdefault((piece.parameter, piece.start, piece.stop, piece.columns), {})[piece.state] = offset
    return file, [StoredPiece(name, start, stop, path.name, found, columns) for (name, start, stop, columns), found in offsets.items()]


def _tensor_name(piece: Piece) -> str:
    columns = "" if piece.columns is None else f".columns_{piece.columns[0]}_{piece.columns[1]}"
    return f"{piece.parameter}.{piece.state}{columns}.{piece.start}"


def write_record(unfinished: Path, rank: int, file: StoredFile, pieces: Sequence[StoredPiece]) -> None:
    """Records in the folder that a rank has written its file, and what the file holds."""
    partial = unfinished / f"{_record_name(rank)}.partial"
    write_durably(partial, json.dumps({"file": members_of(file), "pieces": [members_of(piece) for piece in pieces]}))
    sync_folder(unfinished)
    partial.rename(unfinished / _record_name(rank))  # the last write: rank 0 seals the folder once all records exist


def read_record(unfinished: Path, rank: int) -> tuple[StoredFile, list[StoredPiece]] | None:
    """The record of a rank, or None if it does not exist yet. Raises CheckpointError for a record that cannot be used."""
    path = unfinished / _record_name(rank)
    file = OutsideFile(path, str(path), SHARED_FOLDER, CheckpointError, MANIFEST_BYTES, follows_links=False)
    if file.is_missing():
        return None
    record = file.members()
    return file_of(record.members("file")), [piece_of(piece) for piece in record.list_of_members("pieces")]


def seal(unfinished: Path, manifest: Manifest) -> None:
    """Writes the manifest and its marker (complete.json), and removes files that the manifest does not name.

    Raises CheckpointError if a file of the manifest does not have the length that was written.
    """
    for stored in manifest.files:
        nbytes = (unfinished / stored.name).stat().st_size
        if nbytes != stored.nbytes:
            raise CheckpointError(f"{unfinished / stored.name} has {nbytes} bytes, but {stored.nbytes} were written; {SHARED_FOLDER}")
    text = manifest.to_json()
    write_durably(unfinished / MANIFEST_FILE, text)
    write_durably(unfinished / MARKER_FILE, marker_json(text))
    kept = {MANIFEST_FILE, MARKER_FILE, *(stored.name for stored in manifest.files)}
    for path in unfinished.iterdir():
        if path.name not in kept:
            path.unlink()
    sync_folder(unfinished)


def _record_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"
