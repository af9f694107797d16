"""Reads any range of any parameter from a checkpoint. Every byte read is verified by its checksum, and nothing is unpickled."""

from __future__ import annotations

import fcntl
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_zpp.checkpoint.manifest import (
    ELEMENT_BYTES,
    MANIFEST_FILE,
    CheckpointError,
    DamagedCheckpointError,
    StoredFile,
    read_manifest,
    read_marker,
)
from megatron_zpp.checkpoint.reshard import MissingElementsError, PieceIndex, Source, chunk_runs
from megatron_zpp.checkpoint.verified_file import RUN_CHUNKS, VerifiedFile
from megatron_zpp.config.outside import open_regular
from megatron_zpp.zero.pieces import WEIGHT, Piece


@dataclass(frozen=True)
class Wanted:
    """A range of a file, and the values to fill from it."""

    source: Source
    values: Tensor  # [source.count] fp32


class CheckpointReader:
    """One checkpoint, open for reading. As long as it is open, runs that share the folder do not delete the checkpoint.

    bytes_read: read from its files so far. identity: a text that is unique to this checkpoint.
    Raises CheckpointError if its manifest cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.identity = f"{folder.name} {read_marker(folder)}"
        self.bytes_read = 0
        self._lock = open(open_regular(folder / MANIFEST_FILE), "rb")
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._index = PieceIndex(self.manifest.pieces)
        self._files = {file.name: file for file in self.manifest.files}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._lock.close()

    def read(self, parameter: str, state: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of one state of a flattened parameter, [stop - start] fp32 on the CPU."""
        values = torch.empty(stop - start, dtype=torch.float32)
        self.fill([Piece(parameter, state, start, stop, values)])
        return values

    def weight(self, parameter: str) -> Tensor:
        """The full main weight of a parameter in its shape, fp32 on the CPU."""
        shape = self.manifest.shapes.get(parameter)
        if shape is None:
            raise CheckpointError(f"{self.folder} holds no parameter {parameter}; it holds another model")
        return self.read(parameter, WEIGHT, 0, math.prod(shape)).view(shape)

    def weight_in_parts(self, parameter: str, part_numel: int) -> Iterator[Tensor]:
        """The elements of `weight` in order, in parts of at most part_numel, so that a large parameter needs little memory."""
        numel = math.prod(self.manifest.shapes[parameter])
        for start in range(0, numel, part_numel):
            yield self.read(parameter, WEIGHT, start, min(start + part_numel, numel))

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Fills the values of each piece from the files. No chunk is read twice, except those of headers.

        Raises DamagedCheckpointError if an element of any parameter is missing or stored twice, and if bytes differ from those that were
        written.
        """
        for error in self._errors_of_pieces:
            raise DamagedCheckpointError(f"{self.folder} is incomplete or contradicts itself: {error}")
        by_file: dict[str, list[Wanted]] = defaultdict(list)
        try:
            for piece in pieces:
                for source in self._index.sources(piece.parameter, piece.state, piece.start, piece.stop):
                    values = piece.values[source.first : source.first + source.count]
                    by_file[source.file].append(Wanted(source, values))
        except MissingElementsError as error:
            raise DamagedCheckpointError(f"{self.folder} is incomplete: {error}") from None
        for name, wanted in by_file.items():
            self._fill_from(self._files[name], sorted(wanted, key=lambda place: place.source.offset))

    def verify(self, files: Sequence[StoredFile] | None = None) -> Iterator[str]:
        """Verifies the pieces, and every byte of the files (all by default). Yields the findings about pieces, and one per damaged file."""
        yield from (f"{self.folder} is incomplete or contradicts itself: {error}" for error in self._errors_of_pieces)
        for stored in self.manifest.files if files is None else files:
            try:
                self._read_runs(stored, [(0, stored.nbytes)], lambda data, start: None)
            except DamagedCheckpointError as error:
                yield error.finding

    @cached_property
    def _errors_of_pieces(self) -> tuple[str, ...]:
        numels = {name: math.prod(shape) for name, shape in self.manifest.shapes.items()}
        return tuple(self._index.errors(numels, self.manifest.states))

    def _fill_from(self, stored: StoredFile, wanted: Sequence[Wanted]) -> None:
        ends = [place.source.end for place in wanted]

        def scatter(data: memoryview, start: int) -> None:
            _scatter(data, start, wanted[bisect_right(ends, start) :])

        self._read_runs(stored, [(place.source.offset, place.source.end) for place in wanted], scatter)

    def _read_runs(self, stored: StoredFile, ranges: Sequence[tuple[int, int]], use: Callable[[memoryview, int], None]) -> None:
        """Reads and verifies the chunks that overlap the ranges of a file, and calls use(bytes, first byte) for each run of chunks."""
        file = VerifiedFile(self.folder, stored, self.manifest.chunk_bytes)
        try:
            file.for_each_run(chunk_runs(ranges, self.manifest.chunk_bytes, stored.nbytes, RUN_CHUNKS), use)
        finally:
            self.bytes_read += file.bytes_read
            file.close()


def _scatter(data: memoryview, start: int, wanted: Sequence[Wanted]) -> None:
    """Copies bytes [start, start + len(data)) of a file into the wanted values, which are sorted by offset."""
    elements = torch.frombuffer(data, dtype=torch.float32, count=len(data) // ELEMENT_BYTES)
    stop = start + len(data)
    for place in wanted:
        source = place.source
        if source.offset >= stop:
            return
        first, last = max(start, source.offset), min(stop, source.end)
        target = place.values[(first - source.offset) // ELEMENT_BYTES : (last - source.offset) // ELEMENT_BYTES]
        target.copy_(elements[(first - start) // ELEMENT_BYTES : (last - start) // ELEMENT_BYTES])
