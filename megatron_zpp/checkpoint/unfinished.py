"""The folder of a save in progress: made by the first rank of its disk, filled by every rank, and sealed when it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.system.owner import is_abandoned, own_token
from megatron_zpp.zero.pieces import Piece

SPARE_BYTES = 1 << 20  # for the manifest and other small files


@dataclass(frozen=True)
class Record:
    """Files that ranks have written into the folder, and what is in them."""

    files: tuple[StoredFile, ...]
    pieces: tuple[StoredPiece, ...] = ()

    @classmethod
    def joined(cls, records: Sequence[Record]) -> Record:
        """One record of all."""
        files = (file for record in records for file in record.files)
        return cls(tuple(files), tuple(piece for record in records for piece in record.pieces))

    def to_json(self) -> str:
        """The text of a JSON object."""
        return json.dumps({"files": [members_of(file) for file in self.files], "pieces": [members_of(piece) for piece in self.pieces]})

    @classmethod
    def of(cls, record: Members) -> Record:
        """The record that a JSON object describes, as `to_json` writes it."""
        files, pieces = record.list_of_members("files"), record.list_of_members("pieces")
        return cls(tuple(map(file_of, files)), tuple(map(piece_of, pieces)))

    @classmethod
    def from_other_disk(cls, text: str, name: str) -> Record:
        """The record that has been sent as a text. name: for errors. Raises CheckpointError if it cannot be used."""
        return cls.of(OutsideFile(Path(name), name, "", CheckpointError, MANIFEST_BYTES).members(text.encode()))


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
        raise CheckpointError(f"{folder} has been created by another rank and does not exist on this rank's machine; {SHARED_FOLDER}")
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"the checkpoint takes {_in_gib(needed_bytes)} and {folder.parent} has {_in_gib(free_bytes)} left; "
            "free some, keep fewer checkpoints (--keep-last), or choose another folder (--save)"
        )


def _in_gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f} GiB"


def write_pieces(path: Path, pieces: Sequence[Piece], states: Mapping[str, str], chunk_bytes: int) -> Record:
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
    pieces_of_file = (StoredPiece(name, start, stop, path.name, found, columns) for (name, start, stop, columns), found in offsets.items())
    return Record((file,), tuple(pieces_of_file))


def _tensor_name(piece: Piece) -> str:
    columns = "" if piece.columns is None else f".columns_{piece.columns[0]}_{piece.columns[1]}"
    return f"{piece.parameter}.{piece.state}{columns}.{piece.start}"


def write_record(unfinished: Path, rank: int, record: Record) -> None:
    """Records in the folder what a rank has written there."""
    partial = unfinished / f"{_record_name(rank)}.partial"
    write_durably(partial, record.to_json())
    sync_folder(unfinished)
    partial.rename(unfinished / _record_name(rank))  # the last write: the first rank seals the folder once all records exist


def read_record(unfinished: Path, rank: int) -> Record | None:
    """The record of a rank, or None if it does not exist yet. Raises CheckpointError for a record that cannot be used."""
    path = unfinished / _record_name(rank)
    file = OutsideFile(path, str(path), SHARED_FOLDER, CheckpointError, MANIFEST_BYTES, follows_links=False)
    return None if file.is_missing() else Record.of(file.members())


def seal(unfinished: Path, manifest: Manifest, own_files: Iterable[StoredFile] | None = None) -> str:
    """Writes the manifest and its marker (complete.json), and removes files that the manifest does not name. Returns the marker.

    own_files: those that are on this disk, if it is not the only one.
    Raises CheckpointError if one of them does not have the length that was written.
    """
    for stored in manifest.files if own_files is None else own_files:
        nbytes = (unfinished / stored.name).stat().st_size
        if nbytes != stored.nbytes:
            raise CheckpointError(f"{unfinished / stored.name} has {nbytes} bytes, but {stored.nbytes} were written; {SHARED_FOLDER}")
    text = manifest.to_json()
    marker = marker_json(text)
    write_durably(unfinished / MANIFEST_FILE, text)
    write_durably(unfinished / MARKER_FILE, marker)
    kept = {MANIFEST_FILE, MARKER_FILE, *(stored.name for stored in manifest.files)}
    for path in unfinished.iterdir():
        if path.name not in kept:
            path.unlink()
    sync_folder(unfinished)
    return marker


def _record_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"
