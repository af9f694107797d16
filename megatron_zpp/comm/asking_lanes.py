"""Lanes of a program whose ranks may make different calls. If a hop fails, its error says what each rank has asked for last.

A rank writes that into a store once a wait has lasted for WATCH_SECONDS, so no message is added to a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_zpp.comm.backend import CollectiveError
from megatron_zpp.comm.hop_order import values_in_words
from megatron_zpp.comm.lanes import Hop, ThreadLanes

_PATIENCE_SECONDS = 5.0  # for the words of ranks that fail at about the same time


class AskingLanes:
    """The lanes of one rank. store: one that all ranks of the world reach, for these lanes alone."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._lanes = ThreadLanes(watch=self._tell)
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._asked = 0
        self._last: Hop | None = None
        self._has_told = False

    def submit(self, hop: Hop) -> None:
        self._asked, self._last = self._asked + 1, hop
        with self._in_words():
            self._lanes.submit(hop)

    def wait(self, hop: Hop) -> None:
        with self._in_words():
            self._lanes.wait(hop)
        if self._has_told:
            self._store.delete_key(str(self._rank))
            self._has_told = False

    def drain(self) -> None:
        with self._in_words():
            self._lanes.drain()

    def _tell(self) -> None:
        if not self._has_told and self._last is not None:
            self._store.set(str(self._rank), f"{values_in_words(self._last.lane, self._last.name)}, its hop {self._asked}")
            self._has_told = True

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            raise RuntimeError(f"{error}\nWhat each rank has asked for last: {'; '.join(self._of_ranks())}") from error

    def _of_ranks(self) -> Iterator[str]:
        try:
            self._tell()
            stop = time.monotonic() + _PATIENCE_SECONDS
            for rank in range(self._world_size):
                while not (is_told := self._store.check([str(rank)])) and time.monotonic() < stop:
                    time.sleep(0.1)
                yield f"rank {rank}: {self._store.get(str(rank)).decode() if is_told else 'not known, it waits for no hop'}"
        except RuntimeError:  # the store has gone with the rank that held it
            yield "the others are not known, because the store has gone"
