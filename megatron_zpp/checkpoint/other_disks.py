"""Reads files of a checkpoint that are on the disks of other nodes: ranks that have them send them in rounds of bounded size."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_zpp.checkpoint.disk import Disk
from megatron_zpp.checkpoint.manifest import DamagedCheckpointError, StoredFile
from megatron_zpp.checkpoint.reshard import ByteRange
from megatron_zpp.checkpoint.verified_file import read_unverified, verify
from megatron_zpp.parallel.initialize import joined_errors

ROUND_BYTES = 64 << 20  # that a rank is asked for in one round, unless more ranks ask than there are chunks in it


class Ranks(Protocol):
    """Messages among all ranks, which all call the same methods in the same order; `initialize.WorldRanks` sends them."""

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order."""

    def exchange(self, sent: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """What each rank sends to this one, in rank order. sent: uint8, for each rank. numels: how many bytes come from each."""

    def broadcast(self, data: Tensor, source: int) -> None:
        """Fills `data`, uint8, with that of rank `source`."""


@dataclass(frozen=True)
class WantedRange:
    """Chunks of a file. use: receives the bytes, once they are verified, and their place in the file; it must not keep them."""

    stored: StoredFile
    chunks: ByteRange
    use: Callable[[memoryview, int], None]

    @property
    def nbytes(self) -> int:
        return self.chunks.stop - self.chunks.start


@dataclass(frozen=True)
class _Request:
    """Bytes of a file that rank `reader` has asked for."""

    reader: int
    file: str
    start: int
    stop: int


class OtherDisks:
    """The files of one checkpoint in `folder` of each disk.

    disks_of: by the name of a file the disks that have it. announce: receives a line that says how many bytes come from other disks.
    bytes_received: by this rank so far.
    """

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        ranks: Ranks,
        disks_of: Mapping[str, Sequence[int]],
        announce: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.bytes_received = 0
        self._folder = folder
        self._disk = disk
        self._ranks = ranks
        self._disks_of = disks_of
        self._announce = announce

    def alone_have(self, file: str) -> bool:
        """Whether the rank's own disk lacks the file."""
        return self._disk.index not in self._disks_of[file]

    def read(self, wanted: Iterable[WantedRange], chunk_bytes: int, error: str = "") -> None:
        """Reads the ranges, in order of files and places. Every rank must call it, also one that wants nothing.

        error: why this rank cannot go on. Raises DamagedCheckpointError on every rank if one has such an error, if a range cannot be read,
        or if its bytes differ from those that were written.
        """
        waiting = deque(wanted)
        totals = self._agreed([error, sum(each.nbytes for each in waiting)])
        if sum(totals) > 0:
            nbytes, readers = sum(totals), sum(total > 0 for total in totals)
            self._announce(f"{nbytes / 2**30:.3f} GiB of the checkpoint come from the disks of other nodes, to {readers} ranks")
        while any(totals):
            limit = ROUND_BYTES // sum(total > 0 for total in totals)
            asked = _first_of(waiting, limit)
            error = self._round(asked, chunk_bytes)
            totals = self._agreed([error, sum(each.nbytes for each in waiting)])

    def _agreed(self, own: list[str | int]) -> list[int]:
        """The number of every rank. Raises the error of a rank on all of them."""
        answers = [json.loads(text) for text in self._ranks.gather(json.dumps(own))]
        errors = [error for error, _ in answers]
        if any(errors):
            raise DamagedCheckpointError(joined_errors(errors))
        return [number for _, number in answers]

    def _round(self, asked: Sequence[WantedRange], chunk_bytes: int) -> str:
        """Sends what others ask for, and uses what comes. Returns the first error of this rank."""
        own = json.dumps([[each.stored.name, each.chunks.start, each.chunks.stop] for each in asked])
        requests = [_Request(rank, *found) for rank, text in enumerate(self._ranks.gather(own)) for found in json.loads(text)]
        errors: list[str] = []
        sent: list[list[Tensor]] = [[] for _ in range(self._disk.world_size)]
        for request in requests:
            if self._sender_of(request.file, request.reader) == self._disk.rank:
                sent[request.reader].append(self._read(request, errors))
        asked_of: dict[int, list[WantedRange]] = defaultdict(list)
        for each in asked:
            asked_of[self._sender_of(each.stored.name, self._disk.rank)].append(each)
        nothing = torch.empty(0, dtype=torch.uint8)
        numels = [sum(each.nbytes for each in asked_of[rank]) for rank in range(self._disk.world_size)]
        received = self._ranks.exchange([torch.cat(parts) if parts else nothing for parts in sent], numels)
        for sender, ranges in asked_of.items():
            self._use(received[sender].numpy().data, ranges, chunk_bytes, sender, errors)
        self.bytes_received += sum(numels)
        return errors[0] if errors else ""

    def _use(self, received: memoryview, ranges: Sequence[WantedRange], chunk_bytes: int, sender: int, errors: list[str]) -> None:
        """Verifies the ranges that have come from a rank, one after the other, and uses those that are as they were written."""
        place = 0
        for each in ranges:
            view = received[place : place + each.nbytes]
            place += each.nbytes
            try:
                verify(view, each.chunks.start, each.stored, chunk_bytes, f"{self._folder / each.stored.name} on the disk of rank {sender}")
            except DamagedCheckpointError as error:
                errors.append(error.finding)
                continue
            each.use(view, each.chunks.start)

    def _sender_of(self, file: str, reader: int) -> int:
        """The rank that sends the file to `reader`: those of a disk that has it take turns."""
        disks = self._disks_of[file]
        ranks = self._disk.ranks_of(disks[reader % len(disks)])
        return ranks[reader % len(ranks)]

    def _read(self, request: _Request, errors: list[str]) -> Tensor:
        """The bytes of a range; zeros, which no checksum fits, with an error."""
        data = torch.zeros(request.stop - request.start, dtype=torch.uint8)
        try:
            read_unverified(self._folder / request.file, data.numpy().data, request.start)
        except DamagedCheckpointError as error:
            errors.append(error.finding)
        return data


def _first_of(waiting: deque[WantedRange], most_bytes: int) -> list[WantedRange]:
    """Takes ranges of at most so many bytes, but at least one, from those that wait."""
    taken: list[WantedRange] = []
    nbytes = 0
    while waiting and (not taken or nbytes + waiting[0].nbytes <= most_bytes):
        taken.append(waiting.popleft())
        nbytes += taken[-1].nbytes
    return taken
