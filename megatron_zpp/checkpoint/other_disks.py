"""Reads files of a checkpoint that are on the disks of other nodes: ranks that have them send them in rounds of bounded size."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.checkpoint.disk import Disk, Ranks
from megatron_zpp.checkpoint.manifest import DamagedCheckpointError, StoredFile
from megatron_zpp.checkpoint.reshard import ByteRange
from megatron_zpp.checkpoint.verified_file import read_unverified, verify
from megatron_zpp.parallel.initialize import joined_errors

ROUND_BYTES = 64 << 20  # that a rank is asked for in one round, unless more ranks ask than there are chunks in it


@dataclass(frozen=True)
class WantedRange:
    """Chunks of a file. use: receives the bytes, once they are verified, and their place in the file; it must not keep them."""

    stored: StoredFile
    chunks: ByteRange
    use: Callable[[memoryview, int], None]


@dataclass(frozen=True)
class _Request:
    """Bytes of a file that rank `reader` has asked rank `sender` for."""

    reader: int
    sender: int
    file: str
    start: int
    stop: int


class OtherDisks:
    """The files of one checkpoint in `folder` of each disk.

    disks_of: by the name of a file the disks that have it. announce: receives lines about bytes that come from other disks.
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
        self._unusable: dict[tuple[str, int], set[int]] = defaultdict(set)  # by file and start of a range: disks where it is damaged
        self._told: set[tuple[str, int]] = set()  # files and disks of which a finding has been told
        self._findings: list[str] = []  # to tell

    def alone_have(self, file: str) -> bool:
        """Whether the rank's own disk lacks the file."""
        return self._disk.index not in self._disks_of[file]

    def also_have(self, file: str) -> bool:
        """Whether another disk has the file too."""
        return any(disk != self._disk.index for disk in self._disks_of[file])

    def tell(self, finding: str, file: str, disk: int | None = None) -> None:
        """Announces with the next `read` what is wrong with a file on a disk, by default the rank's own; once, however often it is told."""
        where = (file, self._disk.index if disk is None else disk)
        self._findings += [] if where in self._told else [finding]
        self._told.add(where)

    def read(self, wanted: Iterable[WantedRange], chunk_bytes: int, error: str = "") -> None:
        """Reads the ranges, in order of files and places. Every rank must call it, also one that wants nothing.

        error: why this rank cannot go on. Raises DamagedCheckpointError on every rank if one has such an error, or if no disk has a range
        as it was written.
        """
        waiting = deque(wanted)
        totals = self._agreed(error, waiting)
        if sum(totals) > 0:
            nbytes, readers = sum(totals), sum(total > 0 for total in totals)
            self._announce(f"{nbytes / 2**30:.3f} GiB of the checkpoint come from the disks of other nodes, to {readers} ranks")
        while any(totals):
            limit = ROUND_BYTES // sum(total > 0 for total in totals)
            asked = _first_of(waiting, limit)
            error = self._round(asked, chunk_bytes, waiting)
            totals = self._agreed(error, waiting)

    def _agreed(self, error: str, waiting: Iterable[WantedRange]) -> list[int]:
        """How many bytes every rank waits for. Tells what has been found damaged. Raises the error of a rank on all of them."""
        own = json.dumps([error, self._findings, sum(each.chunks.nbytes for each in waiting)])
        self._findings = []
        answers = [json.loads(text) for text in self._ranks.gather(own)]
        errors = ["; ".join(filter(None, [error, *findings])) for error, findings, _ in answers]
        if any(error for error, _, _ in answers):
            raise DamagedCheckpointError(joined_errors(errors))
        for finding in filter(None, joined_errors(errors).splitlines()):
            self._announce(f"WARNING: {finding}; a copy on another disk is read")
        return [nbytes for _, _, nbytes in answers]

    def _round(self, asked: Sequence[WantedRange], chunk_bytes: int, waiting: deque[WantedRange]) -> str:
        """Sends what others ask for, and uses what comes. What is damaged waits for another disk; without one the error is returned."""
        asked_of: dict[int, list[WantedRange]] = defaultdict(list)
        for each in asked:
            asked_of[self._sender_of(each)].append(each)
        own = json.dumps(
            [[sender, each.stored.name, each.chunks.start, each.chunks.stop] for sender, ranges in asked_of.items() for each in ranges]
        )
        requests = [_Request(rank, *found) for rank, text in enumerate(self._ranks.gather(own)) for found in json.loads(text)]
        sent: list[list[Tensor]] = [[] for _ in range(self._disk.world_size)]
        for request in requests:
            if request.sender == self._disk.rank:
                sent[request.reader].append(self._read(request))
        nothing = torch.empty(0, dtype=torch.uint8)
        numels = [sum(each.chunks.nbytes for each in asked_of[rank]) for rank in range(self._disk.world_size)]
        received = self._ranks.exchange([torch.cat(parts) if parts else nothing for parts in sent], numels)
        self.bytes_received += sum(numels)
        errors: list[str] = []
        for sender, ranges in asked_of.items():
            place = 0
            for each in ranges:
                view = received[sender].numpy().data[place : place + each.chunks.nbytes]
                place += each.chunks.nbytes
                finding = self._use(view, each, chunk_bytes, sender)
                if finding and not self._find_elsewhere(each, chunk_bytes, self._disk.index_of(sender), waiting):
                    errors.append(finding)
                elif finding:
                    self.tell(finding, each.stored.name, self._disk.index_of(sender))
        return errors[0] if errors else ""

    def _find_elsewhere(self, asked: WantedRange, chunk_bytes: int, disk: int, waiting: deque[WantedRange]) -> bool:
        """Whether a range that is damaged on a disk can be had otherwise: it waits for another disk, or is read from the rank's own."""
        self._unusable[asked.stored.name, asked.chunks.start].add(disk)
        if self._usable(asked):
            waiting.append(asked)
            return True
        if self.alone_have(asked.stored.name):
            return False
        data = bytearray(asked.chunks.nbytes)  # the rank has asked others because the file is damaged here, but perhaps in another range
        with suppress(DamagedCheckpointError):
            read_unverified(self._folder / asked.stored.name, memoryview(data), asked.chunks.start)
            return not self._use(memoryview(data), asked, chunk_bytes, self._disk.rank)
        return False

    def _use(self, view: memoryview, asked: WantedRange, chunk_bytes: int, sender: int) -> str:
        """Uses a range that has come from a rank if its bytes are as they were written; else it returns what is wrong."""
        name = f"{self._folder / asked.stored.name} on the disk of rank {sender}"
        try:
            verify(view, asked.chunks.start, asked.stored, chunk_bytes, name)
        except DamagedCheckpointError as error:
            return error.finding
        asked.use(view, asked.chunks.start)
        return ""

    def _usable(self, asked: WantedRange) -> list[int]:
        """The disks of others that have a range, except those where this rank has found it damaged."""
        unusable = {self._disk.index, *self._unusable.get((asked.stored.name, asked.chunks.start), ())}
        return [disk for disk in self._disks_of[asked.stored.name] if disk not in unusable]

    def _sender_of(self, asked: WantedRange) -> int:
        """The rank that sends a range to this one: those of a disk that has it take turns."""
        disks, reader = self._usable(asked), self._disk.rank
        ranks = self._disk.ranks_of(disks[reader % len(disks)])
        return ranks[reader % len(ranks)]

    def _read(self, request: _Request) -> Tensor:
        """The bytes of a range; zeros, which no checksum fits, if they cannot be read."""
        data = torch.zeros(request.stop - request.start, dtype=torch.uint8)
        try:
            read_unverified(self._folder / request.file, data.numpy().data, request.start)
        except DamagedCheckpointError as error:
            self.tell(error.finding, request.file)
        return data


def _first_of(waiting: deque[WantedRange], most_bytes: int) -> list[WantedRange]:
    """Takes ranges of at most so many bytes, but at least one, from those that wait."""
    taken: list[WantedRange] = []
    nbytes = 0
    while waiting and (not taken or nbytes + waiting[0].chunks.nbytes <= most_bytes):
        taken.append(waiting.popleft())
        nbytes += taken[-1].chunks.nbytes
    return taken
