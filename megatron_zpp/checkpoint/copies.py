"""Copies the files of a save to the disks of other nodes (--save-copies), so that a checkpoint outlives the loss of a disk.

The files of a node go to the nodes after it, in rounds in which the first ranks of all nodes send and receive at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.checkpoint.disk import Disk, Messages
from megatron_zpp.checkpoint.manifest import CheckpointError, DamagedCheckpointError, StoredFile
from megatron_zpp.checkpoint.reshard import ByteRange, chunk_ranges
from megatron_zpp.checkpoint.verified_file import read_unverified, verify

ROUND_BYTES = 8 << 20  # of one disk; with two copies three times as many are in memory: sent, received, and being written
ROUNDS_AT_A_TIME = 16  # before the nodes agree to go on: seldom enough for a long link, and a full disk is known soon
NOTHING = torch.empty(0, dtype=torch.uint8)


class _Stretch(NamedTuple):
    """Chunks of a file, which cross in one round."""

    stored: StoredFile
    chunks: ByteRange


class Copies:
    """Copies on their way between the unfinished folders of a save.

    folder: that of this disk. written: by disk, the files that its ranks have written. firsts: messages among the first ranks of all disks.
    count: receives the bytes that have come in a round.
    rounds: how many there are, the same on every disk. files: that come to this disk.
    """

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        firsts: Messages,
        written: Sequence[Sequence[StoredFile]],
        chunk_bytes: int,
        count: Callable[[int], None],
    ) -> None:
        self._folder = folder
        self._disk = disk
        self._firsts = firsts
        self._chunk_bytes = chunk_bytes
        self._count = count
        self._round_chunks = max(1, ROUND_BYTES // chunk_bytes)
        self._own = self._stretches(written[disk.index])
        self._coming = {source: self._stretches(written[source]) for source in disk.copied_here}
        self._error: Exception | None = None
        self.rounds = max(map(self._rounds_of, written))
        self.files = tuple(file for source in disk.copied_here for file in written[source])

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
        """What comes from each disk in a round. A disk that has sent all sends nothing."""
        sent, numels = [NOTHING] * self._disk.count, [0] * self._disk.count
        for own in self._own[number : number + 1]:
            data = self._read(own)
            for target in self._disk.copied_to:
                sent[target] = data
        for source, stretches in self._coming.items():
            numels[source] = sum(coming.chunks.nbytes for coming in stretches[number : number + 1])
        return self._firsts.exchange(sent, numels)

    def _read(self, own: _Stretch) -> Tensor:
        """The bytes of a stretch; zeros after an error, for the others wait for them."""
        data = torch.zeros(own.chunks.nbytes, dtype=torch.uint8)
        try:
            read_unverified(self._folder / own.stored.name, data.numpy().data, own.chunks.start)
        except Exception as error:
            self._keep(error)
        return data

    def _write(self, number: int, received: Sequence[Tensor]) -> None:
        """Verifies what has come in a round, and writes it durably; nothing more after an error."""
        try:
            self._count(sum(values.numel() for values in received))
            for source, stretches in self._coming.items():
                for coming in stretches[number : number + 1]:
                    if self._error is None:
                        self._write_stretch(coming, received[source].numpy().data, source)
        except Exception as error:
            self._keep(error)

    def _write_stretch(self, coming: _Stretch, data: memoryview, source: int) -> None:
        path = self._folder / coming.stored.name
        verify(data, coming.chunks.start, coming.stored, self._chunk_bytes, f"what node {source} has sent of {path}")
        try:
            with path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written ({error.strerror}); free space or choose another folder") from error

    def _keep(self, error: Exception) -> None:
        """Keeps the first error. That of damaged bytes has a remedy for a run that loads them; these are new."""
        self._error = self._error or (CheckpointError(error.finding) if isinstance(error, DamagedCheckpointError) else error)

    def _stretches(self, files: Sequence[StoredFile]) -> list[_Stretch]:
        """What a disk sends of its files, by round."""
        chunks_of = partial(chunk_ranges, chunk_bytes=self._chunk_bytes, most_chunks=self._round_chunks)
        return [_Stretch(file, chunks) for file in files for chunks in chunks_of([(0, file.nbytes)], file_bytes=file.nbytes)]

    def _rounds_of(self, files: Sequence[StoredFile]) -> int:
        """How many stretches there are, without a list of those of all nodes."""
        return sum(-(-file.nbytes // (self._round_chunks * self._chunk_bytes)) for file in files)
