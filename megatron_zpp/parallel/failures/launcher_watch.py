"""Ends a rank whose launcher has died, so that it neither trains on alone nor keeps devices, ports and the --save folder.

The parent is polled. The kernel could send a signal instead (prctl PR_SET_PDEATHSIG), but it sends it when the thread ends that started
this process, although the launcher may live on; it forgets the request when a program with other rights is executed; it says nothing
if the parent died before the request; and a process that is killed cannot tell the others why.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from megatron_zpp.system.process_start import parent_at_start

POLL_SECONDS = 1.0
LAST_WORDS_SECONDS = 6.0  # for the report; a store or a terminal that does not answer keeps no rank alive
FAILURE_EXIT_CODE = 1
# Processes that become the parent of those whose own has died. None of them starts ranks as torchrun, srun and mpirun do.
REAPERS = frozenset({"init", "systemd", "tini", "dumb-init", "docker-init", "catatonit"})


class LauncherWatch:
    """Watches the launcher during a `with` block. is_launched: whether there is one; a process without one survives its parent.

    report: tells the other ranks of a failure; set it once there is a way to. release: gives up, after that, what this process holds.
    """

    def __init__(self, rank: int, *, is_launched: bool) -> None:
        self._rank = rank
        self._is_launched = is_launched
        self._launcher = parent_at_start()
        self._done = Event()
        self.report: Callable[[str], object] = lambda text: None
        self.release: Callable[[], object] = lambda: None

    def __enter__(self) -> LauncherWatch:
        if self._is_launched:
            Thread(target=self._watch, name="launcher watch", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()

    def _watch(self) -> None:
        if _is_reaper(self._launcher):
            self._end("its launcher died before this process had begun")
        while not self._done.wait(POLL_SECONDS):
            if os.getppid() != self._launcher:
                self._end(f"its launcher, process {self._launcher}, has died")

    def _end(self, why: str) -> None:
        last_words = Thread(target=self._say, args=(why,), daemon=True)
        last_words.start()
        last_words.join(LAST_WORDS_SECONDS)
        os._exit(FAILURE_EXIT_CODE)

    def _say(self, why: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the launcher may have read standard error
            print(f"[Rank {self._rank}] ended, because {why}", file=sys.stderr, flush=True)
        self.report(why)
        self.release()


def _is_reaper(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip() in REAPERS
    except OSError:
        return False
