"""The times of copies between a device and its host, and how long computation waits for those of kept inputs (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_zpp.parallel.specs import Use


@dataclass(frozen=True)
class KeptOnHost:
    """What a rank keeps on its host of the input of every recomputed chunk: `part_bytes`, 0 if nothing.

    is_divided: whether other ranks have parts too, which are gathered one chunk ahead, and therefore come up two chunks ahead.
    """

    part_bytes: int = 0
    is_divided: bool = False


NOTHING_ON_HOST = KeptOnHost()


class HostLinkClock:
    """One direction carries one copy at a time, first come, first served. busy: seconds of all copies so far."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._down_free = self._up_free = self.busy = 0.0

    def down(self, nbytes: int, ready: float) -> float:
        """The time at which a copy to the host has ended that can begin at `ready`."""
        self._down_free = max(ready, self._down_free) + self._seconds(nbytes)
        return self._down_free

    def up(self, nbytes: int, ready: float) -> float:
        """The same of a copy to the device."""
        self._up_free = max(ready, self._up_free) + self._seconds(nbytes)
        return self._up_free

    def _seconds(self, nbytes: int) -> float:
        seconds = nbytes / self._bytes_per_second
        self.busy += seconds
        return seconds


@dataclass
class KeptCopies:
    """The copies of kept inputs, as comm/kept_places.py:HostPlaces and tensor_parallel/kept_inputs.py make them.

    Forward copies the input of a chunk down when the chunk begins, and waits for the copy of the chunk before. Backward waits for the input
    of its chunk, while that of the chunk before comes up.
    """

    kept: KeptOnHost
    link: HostLinkClock
    uses: Sequence[Use]
    _left: float = 0.0  # when the last copy down has ended
    _arrived: dict[int, float] = field(default_factory=dict)  # by chunk, when its input is on the device

    def __post_init__(self) -> None:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, use in enumerate(self.uses):
            if use.recomputed_in is not None and self.kept.part_bytes:
                first.setdefault(use.recomputed_in, index)
                last[use.recomputed_in] = index
        self._begun_by = {index: chunk for chunk, index in first.items()}
        self._ended_by = {index: chunk for chunk, index in last.items()}

    def before(self, use: int, now: float, *, is_backward: bool) -> float:
        """The time from which the use can compute, `now` or later. Starts the copies that are due."""
        chunk = (self._ended_by if is_backward else self._begun_by).get(use)
        if chunk is None:
            return now
        now = max(now, self._left)
        if not is_backward:
            self._left = self.link.down(self.kept.part_bytes, now)
            return now
        for coming in (chunk, chunk - 1):
            self._start(coming, now)
        if self.kept.is_divided:
            now = max(now, self._arrived.get(chunk - 1, now))
            self._start(chunk - 2, now)
        return max(now, self._arrived.pop(chunk))

    def _start(self, chunk: int, now: float) -> None:
        if chunk >= 0 and chunk not in self._arrived:
            self._arrived[chunk] = self.link.up(self.kept.part_bytes, now)
