"""Checkpoints in parts, on disks that are folders: threads that read them, and disks that fail or die at a chosen call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.dying import DISK_CALLS
from harness.messages import Messages
from harness.rank_threads import on_ranks
from harness.small_state import disks_of, shares, state_at
from megatron_zpp.checkpoint.parts import Parts, PartsFinder

MOST_ITERATIONS = 5  # of states that tests save


def finders(directories: Sequence[Path], world_size: int, messages: Messages | None = None) -> Callable[[int], PartsFinder]:
    """Makes the finder of each rank, where equally many ranks share each disk."""
    messages = messages or Messages(world_size)
    disks = disks_of(world_size, len(directories))
    return lambda rank: PartsFinder(directories[disks[rank].index], disks[rank], messages.of(rank))


def loaded(directories: Sequence[Path], world_size: int = 4, step: int | None = None, messages: Messages | None = None) -> tuple[int, int]:
    """The iteration whose state ranks load which have cut it anew, each its own share, and the bytes that came from other disks."""
    make = finders(directories, world_size, messages)

    def load(rank: int) -> tuple[int, int]:
        finder = make(rank)
        names, _ = finder.candidates(step, may_be_older=False)
        return held_by(finder, names[0], rank, world_size)

    found = on_ranks(world_size, load)
    ((held,), nbytes) = {held for held, _ in found}, sum(nbytes for _, nbytes in found)
    return held, nbytes


def held_by(
    finder: PartsFinder, name: str, rank: int, world_size: int, announce: Callable[[str], None] = lambda line: None
) -> tuple[int, int]:
    """The iteration whose state a checkpoint has, by the share of this rank, and the bytes that came from other disks."""
    return held_in(finder, finder.find(name), rank, world_size, announce)


def held_in(
    finder: PartsFinder, parts: Parts, rank: int, world_size: int, announce: Callable[[str], None] = lambda line: None
) -> tuple[int, int]:
    """The same of a checkpoint that has been found."""
    with finder.open(parts, announce) as reader:
        nowhere = {key: torch.full_like(values, torch.nan) for key, values in state_at(0).items()}
        own = shares(nowhere, world_size)[rank].pieces
        reader.fill(own)
        assert reader._others is not None
        nbytes = reader._others.bytes_received
    (held,) = (
        iteration
        for iteration in range(MOST_ITERATIONS)
        if all(piece.values.equal(state_at(iteration)[piece.parameter, piece.state][piece.start : piece.stop]) for piece in own)
    )
    return held, nbytes


@contextmanager
def at_call(folder: Path, moment: int, happens: Callable[[], None], *, stays: bool) -> Iterator[list[str]]:
    """Within the block, `happens` runs before the `moment`-th call that changes anything below the folder; with `stays`, before all later
    ones as well. Gives the names of such calls, as they come.
    """
    lock, seen = threading.Lock(), list[str]()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_call(*arguments: Any, **options: Any) -> Any:
            if _is_below(folder, arguments[0], options.get("dir_fd")):
                with lock:
                    seen.append(name)
                    count = len(seen)
                if count == moment or (stays and count > moment):
                    happens()
            return call(*arguments, **options)

        return count_and_call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in DISK_CALLS:
            patch.setattr(module, name, counted(name, getattr(module, name)))
        yield seen


def _is_below(folder: Path, place: Any, directory: int | None) -> bool:
    if directory is not None:
        place = f"{os.readlink(f'/proc/self/fd/{directory}')}/{place}"
    elif isinstance(place, int):
        place = os.readlink(f"/proc/self/fd/{place}")
    return os.path.abspath(os.fspath(place)).startswith(f"{folder}")


def all_in(directories: Sequence[Path], together: Path) -> Path:
    """A folder into which the parts of all disks are copied, as rsync does."""
    for directory in directories:
        for path in sorted(directory.rglob("*")):
            target = together / path.relative_to(directory)
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.write_bytes(path.read_bytes())
    return together
