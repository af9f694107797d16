"""Reads any range of any parameter from a checkpoint. Every byte read is verified by its checksum, and nothing is unpickled."""

from __future__ import annotations

import fcntl
import logging
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_zpp.checkpoint.manifest import (
    ELEMENT_BYTES,
    ELEMENT_TYPE,
    MANIFEST_FILE,
    CheckpointError,
    DamagedCheckpointError,
    Manifest,
    StoredFile,
    read_manifest,
    read_marker,
)
from megatron_zpp.checkpoint.other_disks import OtherDisks, WantedRange
from megatron_zpp.checkpoint.reshard import ByteRange, MissingElementsError, PieceIndex, chunk_ranges
from megatron_zpp.checkpoint.shard_file import DTYPES
from megatron_zpp.checkpoint.source import Source, byte_ranges
from megatron_zpp.checkpoint.verified_file import CHUNKS_AT_ONCE, VerifiedFile
from megatron_zpp.parallel.division import Stripe
from megatron_zpp.parallel.stripes import columns_of
from megatron_zpp.system.outside import open_regular
from megatron_zpp.zero.pieces import Piece
from megatron_zpp.zero.policy import WEIGHT

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A source, and the values to fill from it."""

    source: Source
    values: Tensor  # of the whole stripe that is wanted


class CheckpointReader:
    """One checkpoint, open for reading until the end of a `with` block. So long, runs that share the folder do not delete it.

    bytes_read: read from its files on this disk so far. identity: a text that is unique to this checkpoint; empty if others have found it.
    Raises CheckpointError if its manifest cannot be used.
    """

    def __init__(
        self, folder: Path, manifest: Manifest | None = None, others: OtherDisks | None = None, beside: Sequence[Path] = ()
    ) -> None:
        """manifest: its own, if it has been read. others: disks of other nodes with files of it; then every rank must call `fill`.

        beside: folders on this machine with other parts of the same checkpoint.
        """
        self.folder = folder
        self.bytes_read = 0
        self._others = others
        self._parts = (folder, *beside)
        self._passed_over: set[Path] = set()  # damaged files of which a warning has been given
        self.identity = ""
        if manifest is None:
            manifest = read_manifest(folder)
            self.identity = f"{folder.name} {read_marker(folder)}"
            self._check_has_all_parts(manifest)
        self.manifest = manifest
        self._locks = [_kept(part / MANIFEST_FILE) for part in self._parts]
        self._index = PieceIndex(self.manifest.pieces, self.manifest.shapes, self.manifest.states, self.manifest.frozen)
        self._files = {file.name: file for file in self.manifest.files}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for lock in filter(None, self._locks):
            lock.close()

    def _check_has_all_parts(self, manifest: Manifest) -> None:
        """Raises CheckpointError if nodes have saved on disks of their own, and files of some of them are not here."""
        if manifest.topology.get("disks", 1) == 1:
            return
        missing = [file.name for file in manifest.files if not (self._folders_of(file.name)[0] / file.name).exists()]
        if missing:
            raise CheckpointError(
                f"{self.folder} is a part of a checkpoint on the disks of {manifest.topology['disks']} nodes and lacks {missing[0]}; "
                "give --node-local-checkpoints to a run, the folders of all nodes to a tool (--load DIR DIR), or copy them into one folder"
            )

    def _folders_of(self, file: str) -> Sequence[Path]:
        """The folders of the parts that have a file; the first part if none has."""
        if len(self._parts) == 1:
            return self._parts  # without asking the file system
        return [part for part in self._parts if (part / file).exists()] or self._parts[:1]

    def read(self, parameter: str, state: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of one state of a flattened parameter, [stop - start] in the state's element type on the CPU.

        state: a key of the manifest's states. Raises DamagedCheckpointError as `fill` does.
        """
        values = torch.empty(stop - start, dtype=DTYPES[self.manifest.states.get(state, ELEMENT_TYPE)], device="cpu")
        self.fill([Piece(parameter, state, start, stop, values)])
        return values

    def weight(self, parameter: str) -> Tensor:
        """The full main weight of a parameter in its shape, fp32 on the CPU. Raises CheckpointError for one that it does not hold."""
        shape = self.manifest.shapes.get(parameter)
        if shape is None:
            raise CheckpointError(f"{self.folder} holds no parameter {parameter}; it holds another model")
        return self.read(parameter, WEIGHT, 0, math.prod(shape)).float().view(shape)

    def weight_in_parts(self, parameter: str, part_numel: int) -> Iterator[Tensor]:
        """The elements of `weight` in order, in parts of at most part_numel, so that a large parameter needs little memory."""
        numel = math.prod(self.manifest.shapes[parameter])
        for start in range(0, numel, part_numel):
            yield self.read(parameter, WEIGHT, start, min(start + part_numel, numel))

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Fills the values of each piece from the files, cast to their dtype. No chunk is read twice, except those of headers.

        Raises DamagedCheckpointError if an element of any parameter is missing or stored twice, and if bytes differ from those that were
        written.
        """
        elsewhere: dict[str, list[Wanted]] = {}
        try:
            for name, wanted in self._wanted_by_file(pieces).items():
                if not self._fill_from_here(name, wanted):
                    elsewhere[name] = wanted
        except DamagedCheckpointError as error:
            if self._others is not None:
                self._others.read((), self.manifest.chunk_bytes, error.finding)
            raise
        if self._others is not None:
            ranges = (each for name, wanted in elsewhere.items() for each in self._ranges_of(name, wanted))
            self._others.read(ranges, self.manifest.chunk_bytes)

    def _fill_from_here(self, name: str, wanted: Sequence[Wanted]) -> bool:
        """Fills what is wanted of a file. False if only the disks of other nodes have it, or have it undamaged."""
        if self._others is not None and self._others.alone_have(name):
            return False
        try:
            self._read_chunks(self._files[name], [*self._chunks_of(name, wanted)], _scatterer(wanted))
        except DamagedCheckpointError as error:
            if self._others is None or not self._others.also_have(name):
                raise
            self._others.tell(error.finding, name)
            return False
        return True

    def _wanted_by_file(self, pieces: Iterable[Piece]) -> dict[str, list[Wanted]]:
        """What each file has of the pieces, by place. Raises DamagedCheckpointError if an element is missing or stored twice."""
        for error in self._errors_of_pieces:
            raise DamagedCheckpointError(f"{self.folder} is incomplete or contradicts itself: {error}")
        by_file: dict[str, list[Wanted]] = defaultdict(list)
        try:
            for piece in pieces:
                for source in self._index.sources(piece.parameter, piece.state, self._stripe_of(piece)):
                    by_file[source.file].append(Wanted(source, piece.values))
        except MissingElementsError as error:
            raise DamagedCheckpointError(f"{self.folder} is incomplete: {error}") from None
        return {name: sorted(wanted, key=lambda place: place.source.offset) for name, wanted in by_file.items()}

    def content(self, name: str) -> bytes:
        """A whole file, verified; nothing if the checkpoint has none of that name."""
        stored = self._files.get(name)
        if stored is None:
            return b""
        data = bytearray(stored.nbytes)

        def put(part: memoryview, start: int) -> None:
            data[start : start + len(part)] = part

        self._read_chunks(stored, [*self._all_chunks(stored)], put)
        return bytes(data)

    def verify(self, files: Sequence[StoredFile] | None = None) -> Iterator[str]:
        """Verifies the pieces, and every byte of the files (all by default). Yields the findings about pieces, and one per damaged file."""
        yield from (f"{self.folder} is incomplete or contradicts itself: {error}" for error in self._errors_of_pieces)
        for stored in self.manifest.files if files is None else files:
            yield from filter(None, (self.damage(stored, folder) for folder in self._folders_of(stored.name)))

    def damage(self, stored: StoredFile, folder: Path | None = None) -> str:
        """What is wrong with a file; empty if nothing is. folder: of the part that has it, by default the first."""
        try:
            self._read_from(folder or self._folders_of(stored.name)[0], stored, self._all_chunks(stored), lambda data, start: None)
        except DamagedCheckpointError as error:
            return error.finding
        return ""

    @cached_property
    def _errors_of_pieces(self) -> tuple[str, ...]:
        return tuple(self._index.errors())

    def _stripe_of(self, piece: Piece) -> Stripe:
        return Stripe(piece.columns or columns_of(self.manifest.shapes.get(piece.parameter, ())), piece.start, piece.stop)

    def _ranges_of(self, name: str, wanted: Sequence[Wanted]) -> Iterator[WantedRange]:
        """The chunks of a file that hold what is wanted of it."""
        use = _scatterer(wanted)
        return (WantedRange(self._files[name], chunks, use) for chunks in self._chunks_of(name, wanted))

    def _chunks_of(self, name: str, wanted: Sequence[Wanted]) -> Iterator[ByteRange]:
        chunk_bytes = self.manifest.chunk_bytes
        ranges = byte_ranges((place.source for place in wanted), chunk_bytes)
        return chunk_ranges(ranges, chunk_bytes, self._files[name].nbytes, CHUNKS_AT_ONCE)

    def _all_chunks(self, stored: StoredFile) -> Iterator[ByteRange]:
        return chunk_ranges([(0, stored.nbytes)], self.manifest.chunk_bytes, stored.nbytes, CHUNKS_AT_ONCE)

    def _read_chunks(self, stored: StoredFile, chunks: Sequence[ByteRange], use: Callable[[memoryview, int], None]) -> None:
        """Reads and verifies ranges of chunks of a file, and calls use(bytes, first byte) for each of them.

        Where a part has the file damaged, that of the next part is read.
        """
        *others, last = self._folders_of(stored.name)
        for folder in others:
            try:
                self._read_from(folder, stored, chunks, use)
            except DamagedCheckpointError as error:
                if folder / stored.name not in self._passed_over:
                    _log.warning("%s; the copy in another folder is read", error.finding)
                self._passed_over.add(folder / stored.name)
            else:
                return
        self._read_from(last, stored, chunks, use)

    def _read_from(self, folder: Path, stored: StoredFile, chunks: Iterable[ByteRange], use: Callable[[memoryview, int], None]) -> None:
        file = VerifiedFile(folder, stored, self.manifest.chunk_bytes)
        try:
            file.for_each_range(chunks, use)
        finally:
            self.bytes_read += file.bytes_read
            file.close()


def _kept(manifest: Path) -> BufferedReader | None:
    """The open file of a manifest, which keeps runs that share its folder from deleting it; None if it cannot be opened here."""
    try:
        file = open(open_regular(manifest), "rb")
    except OSError:
        return None
    with suppress(OSError):  # some file systems have no locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def _scatterer(wanted: Sequence[Wanted]) -> Callable[[memoryview, int], None]:
    """A function that copies bytes of a file, which begin at a place, into the values. wanted: of the file, sorted by offset."""
    reached = list(accumulate((place.source.end for place in wanted), max))  # sources may be between the rows of others
    element_types = {place.source.element_type for place in wanted}

    def scatter(data: memoryview, start: int) -> None:
        elements = {name: _elements(data, name) for name in element_types}
        for index in range(bisect_right(reached, start), len(wanted)):
            source = wanted[index].source
            if source.offset >= start + len(data):
                return
            _scatter(elements[source.element_type], start, start + len(data), wanted[index])

    return scatter


def _elements(data: memoryview, element_type: str) -> Tensor:
    """The bytes as elements."""
    return torch.frombuffer(data, dtype=DTYPES[element_type], count=len(data) // ELEMENT_BYTES[element_type])


def _scatter(elements: Tensor, start: int, stop: int, place: Wanted) -> None:
    """Copies what bytes [start, stop) of a file hold of a source into the wanted values. elements: of these bytes."""
    rows = place.source.rows
    for block in place.source.blocks(start, stop):
        first = (block.offset - start) // elements.itemsize
        if rows is None or block.rows == 1:
            place.values[block.first : block.first + block.width].copy_(elements[first : first + block.width])
            continue
        size = (block.rows, block.width)
        stored = elements[first:].as_strided(size, (rows.stored, 1))
        place.values[block.first :].as_strided(size, (rows.wanted, 1)).copy_(stored)
