"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

from pathlib import Path


def is_alive(process_id: int) -> bool:
    """Whether the process runs; False also if it has ended and its exit code has not been read yet."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children_of(process_id: int) -> list[int]:
    """The processes that its main thread has started and that still exist."""
    return [int(word) for word in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]


def runs(process_id: int, word: str) -> bool:
    """Whether its command contains the word; False if it has gone."""
    try:
        return word.encode() in Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return False
