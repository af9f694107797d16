"""Builds files in one process while the others wait for them. It uses no collective, so a long build cannot cause a time-out.

Two files lie beside the files that are built:

    {stem}.lock     locked by the process that builds; the process touches it as long as it lives, and writes its name into it
    {stem}.error    why the latest attempt failed; every process that waited for that attempt raises the same message

The system releases the lock when its holder ends or is killed; then the next waiting process builds. A dead machine may leave a lock
behind on a shared file system. Then nobody touches the lock file any more, and every waiting process builds for itself. The same happens
on file systems without locks. So every process must build the same bytes, and a file must appear complete (`atomic_write`).
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

from megatron_zpp.system.file_lock import try_lock
from megatron_zpp.system.heartbeat import beating
from megatron_zpp.system.output_file import kept_file, naming_file
from megatron_zpp.system.outside import OutsideFile
from megatron_zpp.system.user_error import UserError

T = TypeVar("T")

POLL_SECONDS = 0.1
LOOK_SECONDS = 2.0  # between two checks for the built files
HEARTBEAT_SECONDS = 5.0
SILENT_SECONDS = 300.0  # a builder without a heartbeat for this long is dead; shared file systems show a touched file sooner
FIRST_LINE_SECONDS = 2.0  # a build faster than this prints no line
LINE_SECONDS = 30.0
HOLDER_BYTES = 1 << 12  # limit of the name in a lock file


@dataclass(frozen=True)
class ProgressPrinter:
    """Prints the progress of building.

    name: of this process, for printed lines and for the lock and error files. prints_waiting: also print lines while this process waits.
    """

    name: str
    print_line: Callable[[str], None]
    prints_waiting: bool = True


SILENT = ProgressPrinter("another process", lambda _: None)


def built_once(stem: Path, what: str, load: Callable[[], T | None], build: Callable[[], T], progress: ProgressPrinter) -> T:
    """The result of load(); if that is None, the result of build(), which also stores it. One process builds, the others wait and load.

    what: names the built thing in printed lines, such as "indices of corpus".
    An error of build() is raised here and in every process that waited for it: UserError as UserError, others as RuntimeError.
    Raises OSError if no lock file can be created in the folder.
    """
    found = load()
    if found is not None:
        return found
    stem.parent.mkdir(parents=True, exist_ok=True)
    failure_before = _read_failure(stem)
    with open(_with_ending(stem, ".lock"), "ab", opener=lambda path, _: kept_file(path, appends=True)) as lock:
        _wait_for_lock(lock, what, progress, lambda: load() is not None)
        found = load()
        if found is not None:
            return found
        failure = _read_failure(stem)
        if failure is not None and failure != failure_before:
            raise failure.as_error()
        return _build(stem, lock, what, build, progress)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write. It gets its name when it is complete and on disk; an error in the block removes it."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with naming_file(path), open(temporary, "xb") as file:  # "x": a link of this name would be written through otherwise
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
        return UserError(self.message) if self.is_mistake else RuntimeError(self.message)


def _build(stem: Path, lock: BinaryIO, what: str, build: Callable[[], T], progress: ProgressPrinter) -> T:
    failure_path = _with_ending(stem, ".error")
    try:
        with _heartbeat(lock, what, progress):
            built = build()
    except Exception as error:
        is_mistake = isinstance(error, UserError)
        message = str(error) if is_mistake else f"{progress.name} failed to build {what}: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError), atomic_write(failure_path) as file:
            file.write(json.dumps([uuid.uuid4().hex, is_mistake, message]).encode())
        raise
    failure_path.unlink(missing_ok=True)
    return built


def _read_failure(stem: Path) -> _Failure | None:
    path = _with_ending(stem, ".error")
    try:
        found = OutsideFile(path, str(path)).entries()
    except ValueError:
        return None
    is_ours = [type(value) for value in found] == [str, bool, str]
    return _Failure(*found) if is_ours else None


def _with_ending(stem: Path, ending: str) -> Path:
    return stem.with_name(stem.name + ending)


def _wait_for_lock(lock: BinaryIO, what: str, progress: ProgressPrinter, is_built: Callable[[], bool]) -> None:
    """Returns with the lock. Returns without it if the file system has no locks, the holder seems dead, or is_built() is true."""
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
            progress.print_line(f"{_holder(lock)} has shown no life for {SILENT_SECONDS:.0f} s: {progress.name} builds {what} itself")
            return
        if now >= next_look:
            if is_built():
                return
            next_look = now + LOOK_SECONDS
        if now >= next_line and progress.prints_waiting:
            progress.print_line(f"{progress.name} waits for {what}, which {_holder(lock)} builds ({now - started:.0f} s)")
            next_line += LINE_SECONDS


def _holder(lock: BinaryIO) -> str:
    with contextlib.suppress(ValueError):
        return OutsideFile(Path(lock.name), lock.name, most_bytes=HOLDER_BYTES).text() or SILENT.name
    return SILENT.name


@contextmanager
def _heartbeat(lock: BinaryIO, what: str, progress: ProgressPrinter) -> Iterator[None]:
    """Touches the lock file while the block runs. If the block takes long, prints how long it has run so far."""
    os.ftruncate(lock.fileno(), 0)
    lock.write(progress.name.encode())
    lock.flush()
    started = time.monotonic()
    next_line = started + FIRST_LINE_SECONDS

    def beat() -> None:
        nonlocal next_line
        with contextlib.suppress(OSError):
            os.utime(lock.name)
        now = time.monotonic()
        if now >= next_line:
            progress.print_line(f"{progress.name} builds {what} ({now - started:.0f} s)")
            next_line += LINE_SECONDS

    with beating(beat, min(HEARTBEAT_SECONDS, FIRST_LINE_SECONDS)):
        yield
    seconds = time.monotonic() - started
    if seconds >= FIRST_LINE_SECONDS:
        progress.print_line(f"{progress.name} has built {what} ({seconds:.0f} s)")
