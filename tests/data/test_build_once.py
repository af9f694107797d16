import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from harness.disk_events import disk_events
from harness.patience import PATIENCE_SECONDS, ClockOfLife, SetClock, wait_until

from megatron_zpp.data import build_once
from megatron_zpp.data.build_once import SILENT, ProgressPrinter, atomic_write, built_once
from megatron_zpp.system.file_lock import try_lock
from megatron_zpp.system.user_error import UserError


def reader(path: Path) -> Callable[[], str | None]:
    return lambda: path.read_text() if path.exists() else None


def writer(path: Path, text: str = "built") -> Callable[[], str]:
    def write() -> str:
        with atomic_write(path) as file:
            file.write(text.encode())
        return text

    return write


def must_not_build() -> str:
    raise AssertionError("built although it is there")


def build_in(folder: Path, build: Callable[[], str], progress: ProgressPrinter = SILENT) -> str:
    return built_once(folder / "thing", "the thing", reader(folder / "thing.txt"), build, progress)


class Waiting(threading.Thread):
    """A thread that acts as another process: locks of two open files exclude each other inside one process, too."""

    def __init__(self, folder: Path, build: Callable[[], str], progress: ProgressPrinter = SILENT) -> None:
        super().__init__()
        self.folder, self.build, self.progress = folder, build, progress
        self.result: str | Exception | None = None
        self.has_found_the_lock_taken = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self.result = build_in(self.folder, self.build, self.progress)
        except Exception as error:
            self.result = error

    def end(self) -> "str | Exception | None":
        self.join(PATIENCE_SECONDS)
        return self.result


@pytest.fixture(autouse=True)
def _waiting_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_lock_and_tell(lock: BinaryIO) -> bool:
        is_taken, thread = try_lock(lock), threading.current_thread()
        if not is_taken and isinstance(thread, Waiting):
            thread.has_found_the_lock_taken.set()
        return is_taken

    monkeypatch.setattr(build_once, "try_lock", try_lock_and_tell)


def test_what_is_there_is_loaded_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "thing.txt").write_text("built")
    assert build_in(tmp_path, must_not_build) == "built"
    assert [path.name for path in tmp_path.iterdir()] == ["thing.txt"]


@pytest.mark.parametrize(("raised", "expected"), [(UserError("give more"), UserError), (MemoryError("none left"), RuntimeError)])
def test_who_waited_for_a_builder_that_fails_ends_with_its_message(raised: Exception, expected: type[Exception], tmp_path: Path) -> None:
    waiting: list[Waiting] = []

    def fail() -> str:
        waiting.extend(Waiting(tmp_path, must_not_build) for _ in range(2))
        assert all(waiter.has_found_the_lock_taken.wait(PATIENCE_SECONDS) for waiter in waiting)
        raise raised

    with pytest.raises(type(raised)):
        build_in(tmp_path, fail, ProgressPrinter("rank 0 on a", print))
    for error in (waiter.end() for waiter in waiting):
        assert type(error) is expected and str(raised) in str(error)
    if expected is RuntimeError:
        assert "rank 0 on a failed to build the thing: MemoryError" in str(waiting[0].result)


def test_who_comes_after_a_failure_tries_again_and_clears_it(tmp_path: Path) -> None:
    def fail() -> str:
        raise UserError("give more")

    for _ in range(2):
        with pytest.raises(UserError, match="give more"):
            build_in(tmp_path, fail)
    assert build_in(tmp_path, writer(tmp_path / "thing.txt")) == "built"
    assert not (tmp_path / "thing.error").exists()


def hold_and_build_forever(folder: Path) -> None:
    build_in(folder, lambda: time.sleep(600) or "")  # type: ignore[func-returns-value]


def test_when_the_builder_is_killed_the_next_in_line_builds(tmp_path: Path) -> None:
    builder = multiprocessing.get_context("spawn").Process(target=hold_and_build_forever, args=(tmp_path,))
    builder.start()
    lock = tmp_path / "thing.lock"
    wait_until(lambda: lock.exists() and lock.read_text() != "", "nobody builds")
    waiting = Waiting(tmp_path, writer(tmp_path / "thing.txt"))
    assert waiting.has_found_the_lock_taken.wait(PATIENCE_SECONDS)
    assert waiting.is_alive() and builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    assert waiting.end() == "built"
    builder.join()


def test_a_lock_whose_holder_shows_no_life_is_passed_by_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_once, "SILENT_SECONDS", 0.5)
    lines: list[str] = []
    with open(tmp_path / "thing.lock", "ab") as lock:
        lock.write(b"rank 9 on gone")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert build_in(tmp_path, writer(tmp_path / "thing.txt"), ProgressPrinter("rank 1 on b", lines.append)) == "built"
    assert lines == ["rank 9 on gone has shown no life for 0 s: rank 1 on b builds the thing itself"]


def test_a_living_builder_is_waited_for_longer_than_the_silence_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "thing.lock"
    clock = ClockOfLife(lambda: lock.stat().st_mtime_ns, seconds_per_sign=0.9 * build_once.SILENT_SECONDS)
    monkeypatch.setattr(build_once, "time", clock)
    monkeypatch.setattr(build_once, "HEARTBEAT_SECONDS", 0.01)
    waiting: list[Waiting] = []

    def build_slowly() -> str:
        waiting.append(Waiting(tmp_path, must_not_build))
        wait_until(lambda: clock.now > 5 * build_once.SILENT_SECONDS, "nobody waits")
        clock.has_ended.set()
        return writer(tmp_path / "thing.txt")()

    assert build_in(tmp_path, build_slowly) == "built"
    assert waiting[0].end() == "built"


def test_files_that_appear_end_the_wait_even_if_the_lock_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_once, "LOOK_SECONDS", 0.1)
    with open(tmp_path / "thing.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = Waiting(tmp_path, must_not_build)
        writer(tmp_path / "thing.txt")()
        assert waiting.end() == "built"


def test_builder_and_who_waits_say_so_where_it_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SetClock()
    monkeypatch.setattr(build_once, "time", clock)
    monkeypatch.setattr(build_once, "HEARTBEAT_SECONDS", 0.01)
    builder_lines: list[str] = []
    loud_lines: list[str] = []
    quiet_lines: list[str] = []
    waiting: list[Waiting] = []

    def build_slowly() -> str:
        waiting.append(Waiting(tmp_path, must_not_build, ProgressPrinter("rank 1 on a", loud_lines.append)))
        waiting.append(Waiting(tmp_path, must_not_build, ProgressPrinter("rank 2 on a", quiet_lines.append, prints_waiting=False)))
        assert all(waiter.has_found_the_lock_taken.wait(PATIENCE_SECONDS) for waiter in waiting)
        clock.now = 3.0
        wait_until(lambda: len(builder_lines) > 0, "the builder says nothing")
        clock.now = 31.0
        wait_until(lambda: len(loud_lines) > 0, "who waits says nothing")
        clock.now = 31.5
        return writer(tmp_path / "thing.txt")()

    build_in(tmp_path, build_slowly, ProgressPrinter("rank 0 on a", builder_lines.append))
    assert [waiter.end() for waiter in waiting] == ["built", "built"]
    assert builder_lines == ["rank 0 on a builds the thing (3 s)", "rank 0 on a has built the thing (32 s)"]
    assert loud_lines == ["rank 1 on a waits for the thing, which rank 0 on a builds (31 s)"]
    assert quiet_lines == []


def test_a_file_system_without_locks_lets_everyone_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert build_in(tmp_path, writer(tmp_path / "thing.txt")) == "built"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = disk_events(monkeypatch)
    with atomic_write(tmp_path / "file") as file:
        file.write(b"whole")
    assert len(events) == 2 and events[0].startswith("sync file.") and events[1] == "rename file"


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="in the middle"), atomic_write(tmp_path / "file") as file:
        file.write(b"half")
        raise RuntimeError("in the middle")
    assert list(tmp_path.iterdir()) == []
