"""The manifest of a checkpoint: where each piece of each parameter is stored, and everything else that a run needs to resume exactly.

docs/checkpoints.md describes the format for other programs.
"""

from __future__ import annotations

import gc
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_zpp.config.flag import LARGEST_COUNT
from megatron_zpp.config.schema import GROUPS
from megatron_zpp.data.reading import readings_of, samples_by_length
from megatron_zpp.parallel.stripes import Columns, column_numel, columns_of
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.policy import MOMENTS

FORMAT = "megatron_zpp checkpoint"
FORMAT_VERSION = 3
READ_VERSIONS = (2, 3)
MANIFEST_FILE = "manifest.json"
MARKER_FILE = "complete.json"  # written last: a folder without it is not a checkpoint
ELEMENT_TYPE = "F32"  # of every state but kept copies of the weights, and of every state in version 2
ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # by element type; the names are those of safetensors
CHUNK_BYTES = 1 << 20
MARKER_BYTES, MANIFEST_BYTES = 1 << 16, 1 << 32  # limits; the manifest of 10,000 ranks with 1,000 pieces each has about 2 GB
COUNTS_OF_RUN = ("scheduled_samples", "optimizer_steps")
ITERATION_NAME = r"iter_(?P<iteration>\d{7,})"  # the name of an iteration's folder, as a pattern
INNER_WEIGHT = "inner_weight"  # the state of an island's own main weights, beside the weight that all islands share
DYNAMIC_SCALE = ("scale", "patience")  # belong to a loss scale that counts its good steps
FILE_KEYS = frozenset({"name", "nbytes", "header_bytes", "checksums"})
PIECE_KEYS = frozenset({"parameter", "start", "stop", "file", "offsets", "columns"})
REMEDY = "choose an older one with --ckpt-step, or give --load-last-good-checkpoint"


class CheckpointError(UserError):
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
    """Elements [start, stop) of some columns of a parameter in `file`. offsets: for each state, the byte of the file where they begin.

    columns: first and last, exclusive; None if they are all columns, so that the elements are those of the flattened parameter.
    """

    parameter: str
    start: int
    stop: int
    file: str
    offsets: Mapping[str, int]
    columns: Columns | None = None


@dataclass(frozen=True)
class Manifest:
    """Describes one checkpoint.

    shapes: of whole parameters. states: element type of each stored state of the parameters (the weight and moments). run: what a resumed
    run needs besides tensors. flags: the resolved configuration by group, and the padded vocabulary.
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
    def frozen(self) -> frozenset[str]:
        """The parameters that have a weight and no other state."""
        return frozenset(self.run.get("frozen", ()))

    @property
    def islands(self) -> int:
        """The number of islands whose inner weights and moments are states of their own (`of_island`); 0 if all ranks trained as one."""
        return len(self.run.get("islands", ()))

    @property
    def is_release(self) -> bool:
        """Whether the checkpoint holds only weights and no state of a run."""
        return not self.run

    def to_json(self) -> str:
        """The text of the manifest file, with one line per file and per piece."""
        values = {member.name: getattr(self, member.name) for member in fields(self)}
        lines = [f'"{name}": {_json(value)}' for name, value in {"format": FORMAT, "format_version": FORMAT_VERSION, **values}.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def of_island(state: str, island: int) -> str:
    """The name of a state that every island has for itself."""
    return f"{state}/{island}"


def marker_json(manifest_text: str) -> str:
    """The text of the marker file for this manifest. The marker makes a folder a checkpoint."""
    return json.dumps(_marker_of(manifest_text.encode())) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest in the folder of one iteration.

    Raises DamagedCheckpointError if the manifest or its marker is missing or damaged or the folder is named after another iteration, and
    CheckpointError if it has another format.
    """
    return manifest_of(folder, manifest_bytes(folder))


def manifest_of(folder: Path, data: bytes) -> Manifest:
    """The manifest with this content, in the folder or, of that name, on another disk. Raises errors as `read_manifest` does."""
    file = _stored(folder / MANIFEST_FILE, MANIFEST_BYTES)
    with _without_collections():
        # Flags are not numbers of the checkpoint: whoever uses them checks them like flags of the command line.
        manifest = _parse(file, file.members(data, has_any_numbers=True))
    named = re.match(ITERATION_NAME, folder.name)
    if named is not None and int(named["iteration"]) != manifest.iteration:
        file.refuse(f"is that of iteration {manifest.iteration}")
    return manifest


@contextmanager
def _without_collections() -> Iterator[None]:
    """A million pieces, of thousands of ranks, are objects without cycles. Collections would take half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def manifest_bytes(folder: Path) -> bytes:
    """The content of the manifest's file, which has the checksum in the marker. Raises DamagedCheckpointError if it does not."""
    marker = _stored(folder / MARKER_FILE, MARKER_BYTES).members()
    file = _stored(folder / MANIFEST_FILE, min(marker.count("manifest_bytes"), MANIFEST_BYTES))
    data = file.content()
    if marker.values != _marker_of(data):
        file.refuse(f"has {len(data)} bytes without the checksum in {MARKER_FILE}")
    return data


def read_marker(folder: Path) -> str:
    """The text of the marker file, which is unique to a checkpoint. Raises DamagedCheckpointError if it cannot be read."""
    return _stored(folder / MARKER_FILE, MARKER_BYTES).text()


def _marker_of(manifest: bytes) -> dict[str, Any]:
    return {"format": FORMAT, "manifest_bytes": len(manifest), "manifest_crc32": zlib.crc32(manifest)}


def is_complete(folder: Path) -> bool:
    """Whether the folder holds a checkpoint with a usable manifest. Its tensors are not checked."""
    return _succeeds(read_manifest, folder)


def is_whole(folder: Path) -> bool:
    """Whether the manifest in the folder is as it was written. It is not parsed, which takes seconds for many ranks."""
    return _succeeds(manifest_bytes, folder)


def _succeeds(read: Callable[[Path], object], folder: Path) -> bool:
    try:
        read(folder)
    except CheckpointError:
        return False
    return True


def _parse(file: OutsideFile, members: Members) -> Manifest:
    if members.values.get("format") != FORMAT:
        raise CheckpointError(f"{file.path} is not a manifest of {FORMAT}; give the folder of a checkpoint of this program")
    version = members.values.get("format_version")
    if version not in READ_VERSIONS:
        known = " and ".join(map(str, READ_VERSIONS))
        raise CheckpointError(f"{file.path} has format version {version}, this program reads {known}; use the program that wrote it")
    members.require_only({"format", "format_version", *(member.name for member in fields(Manifest))})
    shapes, states, versions = (members.members(key) for key in ("shapes", "states", "versions"))
    topology = members.members("topology")
    manifest = Manifest(
        iteration=members.count("iteration"),
        consumed_samples=members.count("consumed_samples"),
        shapes={name: tuple(shapes.counts(name)) for name in shapes.values},
        states={name: states.text(name) for name in states.values},
        run=_run_state(members.members("run"), members.count("consumed_samples")),
        flags=_groups_of_flags(members.members("flags")),
        topology={name: topology.count(name) for name in topology.values},
        versions={name: versions.text(name) for name in versions.values},
        chunk_bytes=members.count("chunk_bytes"),
        files=tuple(file_of(found) for found in members.list_of_members("files")),
        pieces=tuple(piece_of(found) for found in members.list_of_members("pieces")),
    )
    for problem in _contradictions(manifest, version):
        file.refuse(problem)
    return manifest


def _groups_of_flags(found: Members) -> Mapping[str, Any]:
    for group in filter(found.values.__contains__, GROUPS):
        found.members(group)
    return found.values


def _run_state(found: Members, consumed_samples: int) -> Mapping[str, Any]:
    """The state of a run; empty for a release."""
    if not found.values:
        return found.values
    for key in COUNTS_OF_RUN:
        found.count(key)
    for key in ("frozen", "late_parameters"):
        if key in found:
            found.texts(key)
    if "ordered_samples" in found:
        found.count("ordered_samples")
    if "readings" in found:
        _check_tokens(found, consumed_samples)
    _check_optimizer(found)
    for island in found.list_of_members("islands") if "islands" in found else ():
        _check_optimizer(island)
    return found.values


def _check_optimizer(found: Members) -> None:
    """What the optimizer of a run, or of an island, has done."""
    found.count("optimizer_steps")
    if "unused_steps" in found:
        unused = found.members("unused_steps")
        if max(map(unused.count, unused.values), default=0) > found.count("optimizer_steps"):
            found.refuse("unused_steps", "numbers up to run.optimizer_steps")
    scaler = found.members("loss_scaler")
    for key in (*scaler.values, *(DYNAMIC_SCALE if "good_steps" in scaler else ())):
        scaler.number(key)
    if "scale" in scaler and scaler.number("scale") <= 0:
        scaler.refuse("scale", "a number above 0")


def _check_tokens(found: Members, consumed_samples: int) -> None:
    """The tokens of a run are those of its samples, whose lengths its readings say."""
    readings = readings_of(found)
    if readings[-1].first_sample > consumed_samples:
        found.refuse("readings", f"readings that begin before sample {consumed_samples}, which comes next")
    tokens = sum(samples * length for samples, length in samples_by_length(readings, consumed_samples))
    if found.count("consumed_tokens") != tokens:
        found.refuse("consumed_tokens", f"{tokens}, the tokens in the samples of the readings")
    if found.count("scheduled_tokens") > tokens:
        found.refuse("scheduled_tokens", f"at most the {tokens} consumed tokens")


def file_of(found: Members) -> StoredFile:
    """The file that a JSON object describes, as `members_of` writes it. Its name does not lead out of a folder."""
    found.require_only(FILE_KEYS)
    name = found.text("name")
    if name != Path(name).name or name in ("", ".", "..") or not name.isprintable():
        found.refuse("name", "the name of a file")
    return StoredFile(name, found.count("nbytes"), found.count("header_bytes"), tuple(found.counts("checksums")))


def piece_of(found: Members) -> StoredPiece:
    """The piece that a JSON object describes, as `members_of` writes it."""
    found.require_only(PIECE_KEYS)
    offsets = found.members("offsets")
    by_state = {state: offsets.count(state) for state in offsets.values}
    columns = _stored_columns(found) if "columns" in found else None
    return StoredPiece(found.text("parameter"), found.count("start"), found.count("stop"), found.text("file"), by_state, columns)


def _stored_columns(found: Members) -> Columns:
    columns = found.counts("columns")
    if len(columns) != 2:
        found.refuse("columns", "a list of two numbers")
    return columns[0], columns[1]


def members_of(entry: StoredFile | StoredPiece) -> dict[str, Any]:
    """The JSON object of a file or a piece."""
    return {name: value for name, value in vars(entry).items() if value is not None}


def _contradictions(manifest: Manifest, version: int) -> Iterator[str]:
    """Errors in the manifest that would break a reader."""
    files = {file.name: file for file in manifest.files}
    of_run = {key: manifest.run.get(key, 0) for key in (*COUNTS_OF_RUN, "ordered_samples")}
    for island, of_island_run in enumerate(manifest.run.get("islands", ())):
        of_run[f"islands[{island}].optimizer_steps"] = of_island_run["optimizer_steps"]
    for name, count in {"iteration": manifest.iteration, "consumed_samples": manifest.consumed_samples, **of_run}.items():
        if count > LARGEST_COUNT:
            yield f"has {name} {count}, more than {LARGEST_COUNT}, which no run reaches"
    for state, element_type in manifest.states.items():
        if element_type not in ELEMENT_BYTES or (version == 2 and element_type != ELEMENT_TYPE):
            yield f"has the state {state} with elements of type {element_type}"
            return  # the number of bytes is not defined then
    own_states = [of_island(state, island) for island in range(manifest.islands) for state in (INNER_WEIGHT, *MOMENTS)]
    if missing := [state for state in own_states if state not in manifest.states]:
        yield f"has {manifest.islands} islands and no state {missing[0]}"
    element_bytes = {state: ELEMENT_BYTES[element_type] for state, element_type in manifest.states.items()}
    if manifest.chunk_bytes < 1 or any(manifest.chunk_bytes % nbytes for nbytes in element_bytes.values()):
        yield f"has chunks of {manifest.chunk_bytes} bytes"
        return  # the number of checksums is not defined then
    for file in manifest.files:
        if len(file.checksums) != -(-file.nbytes // manifest.chunk_bytes) or not 0 < file.header_bytes <= file.nbytes:
            yield f"has {len(file.checksums)} checksums and {file.header_bytes} bytes of header for the {file.nbytes} bytes of {file.name}"
    for piece in manifest.pieces:
        if piece.parameter not in manifest.shapes or piece.file not in files:
            yield f"has a piece of {piece.parameter} in {piece.file}, one of which it does not describe"
            return
        yield from _contradictions_of_columns(piece, manifest.shapes[piece.parameter], version)
        for state, offset in piece.offsets.items():
            nbytes = (piece.stop - piece.start) * element_bytes.get(state, 1)
            is_inside = files[piece.file].header_bytes <= offset <= files[piece.file].nbytes - nbytes
            if state not in element_bytes or offset % element_bytes[state] or not is_inside:
                yield f"has {state} of {piece.parameter} at byte {offset} of {piece.file}"


def _contradictions_of_columns(piece: StoredPiece, shape: tuple[int, ...], version: int) -> Iterator[str]:
    first, last = piece.columns or columns_of(shape)
    if piece.columns is not None and (version == 2 or len(shape) != 2 or not first < last <= shape[1]):
        yield f"has a piece of columns {first} to {last} of {piece.parameter}, which has shape {list(shape)}"
    numel = column_numel(shape) * (last - first)
    if not piece.start < piece.stop <= numel:
        words = "elements" if piece.columns is None else f"elements in columns {first} to {last}"
        yield f"has a piece from {piece.start} to {piece.stop} of {piece.parameter}, which has {numel} {words}"


def _stored(path: Path, most_bytes: int) -> OutsideFile:
    return OutsideFile(path, str(path), error=_damaged, most_bytes=most_bytes)


def _damaged(sentence: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{sentence}: the checkpoint is damaged or incomplete")


def _json(value: Any) -> str:
    if isinstance(value, tuple) and value:
        return "[\n " + ",\n ".join(json.dumps(members_of(entry)) for entry in value) + "\n]"
    return json.dumps(value)
