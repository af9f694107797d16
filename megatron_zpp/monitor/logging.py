"""Prints lines on standard output, from one rank for all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime


class RankPrinter:
    """Prints on one rank of the world: milestones on the first, training lines on the last, as Megatron does. Skips empty texts."""

    def __init__(self, rank: int, world_size: int, *, now: Callable[[], datetime] = datetime.now) -> None:
        self.rank = rank
        self.world_size = world_size
        self._now = now

    def on_first(self, text: str) -> None:
        if self.rank == 0 and text:
            _print_whole(text)

    def on_last(self, text: str) -> None:
        if self.rank == self.world_size - 1 and text:
            _print_whole(text)

    def on_this(self, text: str) -> None:
        """Prints the text on every rank that calls this."""
        if text:
            _print_whole(text)

    def milestone(self, text: str) -> None:
        """Prints text and time on the first rank: `[after dataloaders are built] datetime: 2026-08-03 12:00:00 `."""
        self.on_first(f"[{text}] datetime: {self._now():%Y-%m-%d %H:%M:%S} ")


def _print_whole(text: str) -> None:
    # One write per text: ranks share the stream, and with a separate write of the newline their lines could mix.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
