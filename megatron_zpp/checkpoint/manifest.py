"""The manifest of a checkpoint: which bytes of which file hold which piece of which parameter, and what a run needs to go on exactly.

docs/checkpoints.md describes the whole format for other programs.
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
MARKER_FILE = "complete.json"  # written last: without it a folder is no checkpoint
ELEMENT_TYPE, ELEMENT_BYTES = "F32", 4  # of every state, in the words of safetensors
CHUNK_BYTES = 1 << 20
REMEDY = "choose an older one with --ckpt-step, or give --load-last-good-checkpoint"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, is not there or cannot be written; the text names the file and the remedy."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose bytes are not those that were written, or not all of them."""

    def __init__(self, finding: str) -> None:
        super().__init__(f"{finding}; {REMEDY}")
        self.finding = finding


@dataclass(frozen=True)
class StoredFile:
    """One safetensors file. checksums: CRC-32 of each run of `chunk_bytes` of the whole file, header included."""

    name: str
    nbytes: int
    header_bytes: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class StoredPiece:
    """Elements [start, stop) of a flattened parameter in `file`; offsets: by state, the byte of the file where they begin."""

    parameter: str
    start: int
    stop: int
    file: str
    offsets: Mapping[str, int]


@dataclass(frozen=True)
class Manifest:
    """states: what is stored of the parameters, and its element type. run: what a resumed run needs beside the tensors.

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
        """Whether these are weights of no run: there is nothing to go on from but them."""
        return not self.run

    def to_json(self) -> str:
        """One line per file and per piece."""
        values = {member.name: getattr(self, member.name) for member in fields(self)}
        lines = [f'"{name}": {_json(value)}' for name, value in {"format": FORMAT, "format_version": FORMAT_VERSION, **values}.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def marker_json(manifest_text: str) -> str:
    """The text of the marker that makes a folder with this manifest a checkpoint."""
    return json.dumps(_marker_of(manifest_text.encode())) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest in the folder of one iteration.

    Raises DamagedCheckpointError where it or its marker is missing or damaged, CheckpointError where it is of another format.
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
    """Whether the folder holds a checkpoint whose manifest can be used; its tensors are not looked at."""
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
    """What a reader could stumble over; a name that leaves the folder is the dangerous one."""
    files = {file.name: file for file in manifest.files}
    if manifest.chunk_bytes < 1 or manifest.chunk_bytes % ELEMENT_BYTES:
        yield f"chunks of {manifest.chunk_bytes} bytes"
    for state, element_type in manifest.states.items():
        if element_type != ELEMENT_TYPE:
            yield f"state {state} has elements of type {element_type}"
    for file in manifest.files:
        if file.name != Path(file.name).name or file.name in ("", ".", ".."):
            yield f"{file.name!r} is no name of a file"
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
