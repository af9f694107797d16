"""One process builds, the others wait for its files: no collective is involved, so none can time out however long it takes.

Beside what is built lie

    {stem}.lock     locked by the process that builds; its time of change moves as long as that process lives, its text says who it is
    {stem}.error    why the latest attempt failed; whoever waited for that attempt ends with the same message

The lock goes with its holder, also where that is killed: the next in line then builds. Where a dead machine leaves a lock behind on a
shared file system, the time of change stands still, and the waiting build for themselves. So they do on file systems without locks.
Whatever is built must therefore appear whole and with the same bytes whoever builds it (`appearing_whole`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from megatron_zpp.monitor.file_lock import try_lock
from megatron_zpp.monitor.heartbeat import beating

T = TypeVar("T")

POLL_SECONDS = 0.1
LOOK_SECONDS = 2.0  # between two looks for the files themselves
HEARTBEAT_SECONDS = 5.0
SILENT_SECONDS = 300.0  # a builder without heartbeat for so long is gone; shared file systems show times of change sooner
FIRST_LINE_SECONDS = 2.0  # what is built faster than this is not worth a line
LINE_SECONDS = 30.0


@dataclass(frozen=True)
class Speaker:
    """This process, for the lines and files that others read. announces_waiting: whether it says that it waits, not only that it builds."""

    name: str
    announce: Callable[[str], None]
    announces_waiting: bool = True


SILENCE = Speaker("another process", lambda _: None)


def built_once(stem: Path, what: str, load: Callable[[], T | None], build: Callable[[], T], speaker: Speaker) -> T:
    """What load() finds; where that is None, what build() makes and stores in one process at a time, while others wait and load.

    what: for the lines, such as "indices of corpus". An error of build() is raised here and in every process that waited for it: ValueError
    as such, others as RuntimeError. Raises OSError where no lock file can be made in the folder.
    """
    found = load()
    if found is not None:
        return found
    stem.parent.mkdir(parents=True, exist_ok=True)
    failure_before = _read_failure(stem)
    with open(_with_ending(stem, ".lock"), "ab") as lock:
        _wait_for_lock(lock, what, speaker, lambda: load() is not None)
        found = load()
        if found is not None:
            return found
        failure = _read_failure(stem)
        if failure is not None and failure != failure_before:
            raise failure.as_error()
        return _build(stem, lock, what, build, speaker)


@contextmanager
def appearing_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when it is complete and on disk; an error in the block leaves no trace of it."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Failure:
    attempt: str
    is_mistake: bool
    message: str

    def as_error(self) -> Exception:
        return ValueError(self.message) if self.is_mistake else RuntimeError(self.message)


def _build(stem: Path, lock: BinaryIO, what: str, build: Callable[[], T], speaker: Speaker) -> T:
    failure_path = _with_ending(stem, ".error")
    try:
        with _heartbeat(lock, what, speaker):
            built = build()
    except Exception as error:
        is_mistake = isinstance(error, ValueError)
        message = str(error) if is_mistake else f"{speaker.name} failed to build {what}: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError), appearing_whole(failure_path) as file:
            file.write(json.dumps([uuid.uuid4().hex, is_mistake, message]).encode())
        raise
    failure_path.unlink(missing_ok=True)
    return built


def _read_failure(stem: Path) -> _Failure | None:
    try:
        return _Failure(*json.loads(_with_ending(stem, ".error").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _with_ending(stem: Path, ending: str) -> Path:
    return stem.with_name(stem.name + ending)


def _wait_for_lock(lock: BinaryIO, what: str, speaker: Speaker, is_built: Callable[[], bool]) -> None:
    """Returns with the lock; or without it where the file system has none, its holder shows no life, or what it guards is there."""
    started = last_sign = time.monotonic()
    next_look, next_line = started + LOOK_SECONDS, started + LINE_SECONDS
    changed = os.fstat(lock.fileno()).st_mtime_ns
    while not try_lock(lock):
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        latest = os.stat(lock.name).st_mtime_ns
        if latest != changed:
            changed, last_sign = latest, now
        if now - last_sign > SILENT_SECONDS:
            speaker.announce(f"{_holder(lock)} has shown no life for {SILENT_SECONDS:.0f} s: {speaker.name} builds {what} itself")
            return
        if now >= next_look:
            if is_built():
                return
            next_look = now + LOOK_SECONDS
        if now >= next_line and speaker.announces_waiting:
            speaker.announce(f"{speaker.name} waits for {what}, which {_holder(lock)} builds ({now - started:.0f} s)")
            next_line += LINE_SECONDS


def _holder(lock: BinaryIO) -> str:
    with contextlib.suppress(OSError):
        return Path(lock.name).read_text() or SILENCE.name
    return SILENCE.name


@contextmanager
def _heartbeat(lock: BinaryIO, what: str, speaker: Speaker) -> Iterator[None]:
    """Keeps the lock file's time of change moving, and says how long the block has taken so far where that is long."""
    os.ftruncate(lock.fileno(), 0)
    lock.write(speaker.name.encode())
    lock.flush()
    started = time.monotonic()
    next_line = started + FIRST_LINE_SECONDS

    def beat() -> None:
        nonlocal next_line
        with contextlib.suppress(OSError):
            os.utime(lock.name)
        now = time.monotonic()
        if now >= next_line:
            speaker.announce(f"{speaker.name} builds {what} ({now - started:.0f} s)")
            next_line += LINE_SECONDS

    with beating(beat, min(HEARTBEAT_SECONDS, FIRST_LINE_SECONDS)):
        yield
    seconds = time.monotonic() - started
    if seconds >= FIRST_LINE_SECONDS:
        speaker.announce(f"{speaker.name} has built {what} ({seconds:.0f} s)")
