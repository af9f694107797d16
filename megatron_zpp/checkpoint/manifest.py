"""The manifest of a checkpoint: where each piece of each parameter is stored, and everything else that a run needs to resume exactly.

docs/checkpoints.md describes the format for other programs.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FORMAT = "megatron_zpp checkpoint"
FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
MARKER_FILE = "complete.json"  # written last: a folder without it is not a checkpoint
ELEMENT_TYPE, ELEMENT_BYTES = "F32", 4  # of every state; the name is that of safetensors
CHUNK_BYTES = 1 << 20
REMEDY = "choose an older one with --ckpt-step, or give --load-last-good-checkpoint"


class CheckpointError(ValueError):
    """A checkpoint is missing, cannot be used or cannot be written. The text names the file and the remedy."""


class DamagedCheckpointError(CheckpointError):
    """Bytes of a checkpoint are missing or differ from those that were written."""

    def __init__(self, finding: str) -> None:
        super().__init__(f"{finding}; {REMEDY}")
        self.finding = finding


@dataclass(frozen=True)
class StoredFile:
    """One safetensors file. checksums: CRC-32 of each chunk of `chunk_bytes` bytes, starting with the header."""

    name: str
    nbytes: int
    header_bytes: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class StoredPiece:
    """Elements [start, stop) of a flattened parameter in `file`. offsets: for each state, the byte of the file where they begin."""

    parameter: str
    start: int
    stop: int
    file: str
    offsets: Mapping[str, int]


@dataclass(frozen=True)
class Manifest:
    """Describes one checkpoint.

    states: element type of each stored state of the parameters (the weight and moments). run: what a resumed run needs besides tensors.
    flags: the resolved configuration by group, and the padded vocabulary.
    """

    iteration: int
    consumed_samples: int
    shapes: Mapping[str, tuple[int, ...]]
    states: Mapping[str, str]
    run: Mapping[str, Any]
    flags: Mapping[str, Any]
    topology: Mapping[str, int]
    versions: Mapping[str, str]
    chunk_bytes: int = CHUNK_BYTES
    files: tuple[StoredFile, ...] = ()
    pieces: tuple[StoredPiece, ...] = ()

    @property
    def is_release(self) -> bool:
        """Whether the checkpoint holds only weights and no state of a run."""
        return not self.run

    def to_json(self) -> str:
        """The text of the manifest file, with one line per file and per piece."""
        values = {member.name: getattr(self, member.name) for member in fields(self)}
        lines = [f'"{name}": {_json(value)}' for name, value in {"format": FORMAT, "format_version": FORMAT_VERSION, **values}.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def marker_json(manifest_text: str) -> str:
    """The text of the marker file for this manifest. The marker makes a folder a checkpoint."""
    return json.dumps(_marker_of(manifest_text.encode())) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest in the folder of one iteration.

    Raises DamagedCheckpointError if the manifest or its marker is missing or damaged, and CheckpointError if it has another format.
    """
    marker = _json_object(folder / MARKER_FILE, _bytes_of(folder / MARKER_FILE))
    path = folder / MANIFEST_FILE
    data = _bytes_of(path)
    if marker != _marker_of(data):
        raise DamagedCheckpointError(f"{path} is damaged: its {len(data)} bytes do not have the checksum in {MARKER_FILE}")
    return _parse(path, _json_object(path, data))


def _marker_of(manifest: bytes) -> dict[str, Any]:
    return {"format": FORMAT, "manifest_bytes": len(manifest), "manifest_crc32": zlib.crc32(manifest)}


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a checkpoint with a usable manifest. Its tensors are not checked."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def _parse(path: Path, members: dict[str, Any]) -> Manifest:
    if members.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} is not a manifest of {FORMAT}; give the folder of a checkpoint of this program")
    version = members.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {version}, this program reads {FORMAT_VERSION}; use the program that wrote it")
    try:
        members["files"] = tuple(parse_file(file) for file in members["files"])
        members["pieces"] = tuple(parse_piece(piece) for piece in members["pieces"])
        members["shapes"] = {name: tuple(shape) for name, shape in members["shapes"].items()}
        manifest = Manifest(**members)
        for problem in _contradictions(manifest):
            raise ValueError(problem)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged ({error})") from error
    return manifest


def parse_file(members: Mapping[str, Any]) -> StoredFile:
    return StoredFile(members["name"], members["nbytes"], members["header_bytes"], tuple(members["checksums"]))


def parse_piece(members: Mapping[str, Any]) -> StoredPiece:
    return StoredPiece(**members)


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Errors in the manifest that would break a reader. File names that point out of the folder are the dangerous ones."""
    files = {file.name: file for file in manifest.files}
    if manifest.chunk_bytes < 1 or manifest.chunk_bytes % ELEMENT_BYTES:
        yield f"chunks of {manifest.chunk_bytes} bytes"
    for state, element_type in manifest.states.items():
        if element_type != ELEMENT_TYPE:
            yield f"state {state} has elements of type {element_type}"
    for file in manifest.files:
        if file.name != Path(file.name).name or file.name in ("", ".", ".."):
            yield f"{file.name!r} is not a file name"
        if len(file.checksums) != -(-file.nbytes // manifest.chunk_bytes) or not 0 < file.header_bytes <= file.nbytes:
            yield f"{file.name} has {len(file.checksums)} checksums"
    for piece in manifest.pieces:
        nbytes = (piece.stop - piece.start) * ELEMENT_BYTES
        if not 0 <= piece.start < piece.stop <= math.prod(manifest.shapes[piece.parameter]):
            yield f"{piece.parameter} has a piece from {piece.start} to {piece.stop}"
        for state, offset in piece.offsets.items():
            is_inside = files[piece.file].header_bytes <= offset <= files[piece.file].nbytes - nbytes
            if state not in manifest.states or offset % ELEMENT_BYTES or not is_inside:
                yield f"{piece.parameter} has {state} at byte {offset} of {piece.file}"


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror}): the checkpoint is incomplete") from error


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        members = json.loads(data)
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is damaged ({error})") from error
    if not isinstance(members, dict):
        raise DamagedCheckpointError(f"{path} is damaged (it holds no JSON object)")
    return members


def _json(value: Any) -> str:
    if isinstance(value, tuple) and value:
        return "[\n " + ",\n ".join(json.dumps(vars(entry)) for entry in value) + "\n]"
    return json.dumps(value)
