"""Copies the files of a save to the disks of other nodes (--save-copies), so that a checkpoint outlives the loss of a disk.

The files of a node go to the nodes after it, in rounds in which the first ranks of all nodes send and receive at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.checkpoint.disk import Disk
from megatron_zpp.checkpoint.manifest import CheckpointError, DamagedCheckpointError, StoredFile
from megatron_zpp.checkpoint.reshard import ByteRange, chunk_ranges
from megatron_zpp.checkpoint.verified_file import read_unverified, verify

ROUND_BYTES = 8 << 20  # of one disk; with two copies three times as many are in memory: sent, received, and being written
ROUNDS_AT_A_TIME = 16  # before the nodes agree to go on: seldom enough for a long link, and a full disk is known soon
NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class _Part:
    """Chunks of a file, which cross in one round."""

    stored: StoredFile
    chunks: ByteRange

    @property
    def nbytes(self) -> int:
        return self.chunks.stop - self.chunks.start


class Copies:
    """Copies on their way between the unfinished folders of a save.

    folder: that of this disk. files: by disk, what its ranks have written. count: receives the bytes that have come in a round.
    rounds: how many there are, the same on every disk. files: that come to this disk.
    """

    def __init__(
        self, folder: Path, disk: Disk, files: Sequence[Sequence[StoredFile]], chunk_bytes: int, count: Callable[[int], None]
    ) -> None:
        self._folder = folder
        self._disk = disk
        self._chunk_bytes = chunk_bytes
        self._count = count
        self._parts = [_parts_of(of_disk, chunk_bytes) for of_disk in files]
        self._error: CheckpointError | None = None
        self.rounds = max(map(len, self._parts))
        self.files = tuple(file for source in disk.copied_here for file in files[source])

    def exchange(self, rounds: Sequence[int]) -> None:
        """Sends and receives in these rounds, to the last one also after an error, because others wait. Raises it then."""
        with ThreadPoolExecutor(1) as writer:
            written: Future[None] | None = None
            for number in rounds:
                received = self._exchanged(number)
                if written is not None:
                    written.result()
                written = writer.submit(self._write, number, received)
        if self._error is not None:
            raise self._error

    def _exchanged(self, number: int) -> list[Tensor]:
        """What comes from each disk in a round."""
        own = self._part(self._disk.index, number)
        data = NOTHING if own is None else self._read(own)
        sent = [data if index in self._disk.copied_to else NOTHING for index in range(self._disk.count)]
        numels = [0] * self._disk.count
        for source in self._disk.copied_here:
            part = self._part(source, number)
            numels[source] = 0 if part is None else part.nbytes
        received = self._disk.firsts_in_background.exchange(sent, numels)
        self._count(sum(numels))
        return received

    def _part(self, disk: int, number: int) -> _Part | None:
        """What a disk sends in a round; None if it has sent all."""
        parts = self._parts[disk]
        return parts[number] if number < len(parts) else None

    def _read(self, part: _Part) -> Tensor:
        """The bytes of a part; zeros after an error."""
        data = torch.zeros(part.nbytes, dtype=torch.uint8)
        try:
            read_unverified(self._folder / part.stored.name, data.numpy().data, part.chunks.start)
        except DamagedCheckpointError as error:
            self._error = self._error or CheckpointError(error.finding)
        return data

    def _write(self, number: int, received: Sequence[Tensor]) -> None:
        """Verifies what has come in a round, and writes it durably."""
        for source in self._disk.copied_here:
            part = self._part(source, number)
            if part is None or self._error is not None:
                continue
            path = self._folder / part.stored.name
            try:
                data = received[source].numpy().data
                verify(data, part.chunks.start, part.stored, self._chunk_bytes, f"what node {source} has sent of {path}")
                with path.open("ab") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except DamagedCheckpointError as error:
                self._error = CheckpointError(error.finding)
            except OSError as error:
                self._error = CheckpointError(f"{path} cannot be written ({error.strerror}); free space or choose another folder")


def _parts_of(files: Sequence[StoredFile], chunk_bytes: int) -> list[_Part]:
    """The rounds in which files are sent."""
    chunks = max(1, ROUND_BYTES // chunk_bytes)
    return [_Part(file, part) for file in files for part in chunk_ranges([(0, file.nbytes)], chunk_bytes, file.nbytes, chunks)]
