"""A rank ends when its launcher has died; a process without a launcher does not."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

import pytest
from harness.dying import child

from megatron_zpp.parallel.failures import launcher_watch
from megatron_zpp.parallel.failures.launcher_watch import LauncherWatch


def said_by_orphan(is_launched: bool, report: Callable[[str], object]) -> str:
    """What a process says whose parent is killed once the watch has begun, up to its end."""
    said, pen = os.pipe()
    ready, begun = os.pipe()

    def live() -> None:
        os.dup2(pen, 2)
        sys.stderr = os.fdopen(2, "w")
        parent, watch = os.getppid(), LauncherWatch(3, is_launched=is_launched)
        watch.report, watch.release = report, lambda: os.write(2, b" released")
        os.write(begun, b"b")
        with watch:
            pause = threading.Event()
            while os.getppid() == parent:
                pause.wait(0.01)
            if not is_launched:
                pause.wait(20 * launcher_watch.POLL_SECONDS)
                os.write(2, b"alive")
                return
            pause.wait()

    def launch() -> None:
        child(live)
        threading.Event().wait()

    launcher = child(launch)
    os.close(pen)
    os.read(ready, 1)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    with os.fdopen(said) as lines:
        found = lines.read()  # ends when the last process has ended that could write
    os.close(ready)
    os.close(begun)
    return found.replace(str(launcher), "PID")


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_watch, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(launcher_watch, "LAST_WORDS_SECONDS", 0.5)


def test_a_rank_whose_launcher_is_killed_says_so_reports_it_releases_what_it_holds_and_ends() -> None:
    expected = "[Rank 3] ended, because its launcher, process PID, has died\n"
    assert said_by_orphan(True, lambda text: os.write(2, b"reported")) == expected + "reported released"


def test_a_store_that_does_not_answer_keeps_no_rank_alive() -> None:
    assert "has died" in said_by_orphan(True, lambda _: threading.Event().wait())


def test_a_process_without_a_launcher_survives_its_shell() -> None:
    assert said_by_orphan(False, lambda _: None) == "alive"


def test_a_rank_whose_launcher_died_before_the_first_look_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_watch, "_is_reaper", lambda _: True)
    expected = "[Rank 3] ended, because its launcher died before this process had begun\n released"
    assert said_by_orphan(True, lambda _: None) == expected
