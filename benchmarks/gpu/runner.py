"""Runs parts as processes with limits, and writes what they find as they end (no torch).

    OUTPUT/gpu_check.json     the summary, with the report of every part that has ended
    OUTPUT/gpu_check.txt      the same for people
    OUTPUT/parts/NAME.json    the report of a part that runs; the part itself writes it, from its start on

A part is a process session of its own. One that hangs is killed with all processes that it started, and loses only what it had not found
yet. The seconds that it did not need are there for the next.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.files import read_json, write_json, write_text
from benchmarks.gpu.outcome import CUT_SHORT, FAILED, NOT_DONE, PASSED, UNFINISHED, Outcome, report
from benchmarks.gpu.parts import Part, Wave
from benchmarks.gpu.texts import part_lines, reasons, status_line, summary_lines

PASSED_CODE, FAILED_CODE, LATE_CODE, USELESS_CODE = 0, 1, 3, 4
LAST_LINES = 30  # of what a part that died has printed
KILL_SECONDS = 10.0
END_SECONDS = 5.0  # of the whole limit, for killing and writing
OWN_END_SECONDS = 5.0  # a part shall end by itself this long before it is killed
POLL_SECONDS = 0.1

Command = Callable[[Part, float, Path], list[str]]


@dataclass
class Running:
    """A part that runs. limit_seconds: when it is killed."""

    part: Part
    process: subprocess.Popen[bytes]
    result: Path
    log: Path
    limit_seconds: float
    start: float


class Runner:
    """Runs waves of parts within `limit_seconds`.

    command: the words that start a part, which gets so many seconds and writes its report to that file.
    about: what the summary says of machine and version. clock: seconds, rising.
    """

    def __init__(
        self,
        output: Path,
        limit_seconds: float,
        command: Command,
        about: dict[str, Any],
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output = output
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._time = Deadline(limit_seconds, clock)
        self._command = command
        self._about = about
        self._say = say
        self._running: list[Running] = []
        self._parts: list[Part] = []
        self._interrupted = ""
        self.reports: dict[str, dict[str, Any]] = {}
        (output / "parts").mkdir(parents=True, exist_ok=True)

    def run(self, waves: Sequence[Wave]) -> int:
        """Runs all waves and returns the exit code: 1 if anything failed, else 3 if something did not end in time, else 0.

        If a part without which no other makes sense does not pass, it is the last; code 4 if the machine could not do it.
        """
        self._parts = [part for wave in waves for part in wave]
        self._write_summary()
        with tempfile.TemporaryDirectory() as logs:
            for wave in waves:
                self._start_wave(wave, Path(logs))
                self._wait_while(lambda: any(not running.part.is_in_background for running in self._running))
                if any(part.is_needed and self.reports[part.name]["status"] != PASSED for part in wave):
                    break
            self._wait_while(lambda: bool(self._running))
        self._write_summary()
        with suppress(OSError):  # a part that could not be killed has left a file
            (self._output / "parts").rmdir()
        return self._exit_code()

    def interrupt(self, reason: str) -> None:
        """Ends what runs and starts nothing more. May be called by a signal handler, while `run` is under way."""
        self._interrupted = self._interrupted or reason

    def _seconds_left(self) -> float:
        return 0.0 if self._interrupted else max(0.0, self._time.remaining_seconds() - END_SECONDS)

    # ---- one wave

    def _start_wave(self, wave: Wave, logs: Path) -> None:
        for part in wave:
            left = self._seconds_left()
            if left < part.least_seconds:
                reason = self._interrupted or f"the {self._limit_seconds:.0f} s of the whole check were nearly over"
                self._end(part.name, report(CUT_SHORT, [f"{reason}: {part.says}"]), 0.0)
            else:
                self._start(part, min(part.limit_seconds, left), logs)

    def _wait_while(self, is_so: Callable[[], bool]) -> None:
        while is_so():
            for running in list(self._running):
                self._look_at(running)
            time.sleep(POLL_SECONDS)

    def _start(self, part: Part, seconds: float, logs: Path) -> None:
        self._say(f"== {part.name} starts (about {part.estimate_seconds:.0f} s, at most {seconds:.0f})")
        result, log = self._output / "parts" / f"{part.name}.json", logs / f"{part.name}.txt"
        result.unlink(missing_ok=True)
        command = self._command(part, max(part.least_seconds / 2, seconds - OWN_END_SECONDS), result)
        start = self._clock()  # before the process has done anything
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        self._running.append(Running(part, process, result, log, seconds, start))

    def _look_at(self, running: Running) -> None:
        has_ended = running.process.poll() is not None
        seconds = self._clock() - running.start
        if not has_ended and seconds < running.limit_seconds and not self._interrupted:
            return
        end_session(running.process, min(KILL_SECONDS, self._time.remaining_seconds()))  # also what a part that has ended left behind
        self._running.remove(running)
        for unfinished in running.result.parent.glob(f".{running.result.name}.*"):
            unfinished.unlink()
        self._end(running.part.name, self._report_of(running, was_killed=not has_ended), seconds)

    def _report_of(self, running: Running, *, was_killed: bool) -> dict[str, Any]:
        found = read_json(running.result)
        if not isinstance(found, dict) or "status" not in found:
            found = Outcome().as_json(UNFINISHED)
        if found["status"] != UNFINISHED:
            return found
        said = running.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        if was_killed:
            why = self._interrupted or f"no end within {running.limit_seconds:.0f} s: it hangs, or needs longer here"
            status, reasons = (FAILED if found["failures"] else CUT_SHORT), found["late"]
        else:
            why, status, reasons = f"the part died with exit code {running.process.returncode}", FAILED, found["failures"]
        reasons.append(why)
        return {**found, "status": status, "lines": [*found["lines"], why, *(f"    {line}" for line in said)]}

    def _end(self, name: str, found: dict[str, Any], seconds: float) -> None:
        self.reports[name] = {**found, "seconds": round(seconds, 1)}
        self._say(status_line(name, self.reports[name]))
        self._write_summary()
        (self._output / "parts" / f"{name}.json").unlink(missing_ok=True)

    def _exit_code(self) -> int:
        if any(part.is_needed and self.reports.get(part.name, {}).get("status") == NOT_DONE for part in self._parts):
            return USELESS_CODE
        statuses = {found["status"] for found in self.reports.values()}
        late = any(found["late"] for found in self.reports.values())
        return FAILED_CODE if FAILED in statuses else LATE_CODE if CUT_SHORT in statuses or late else PASSED_CODE

    def _write_summary(self) -> None:
        seconds = round(self._limit_seconds - self._time.remaining_seconds(), 1)
        machine = self.reports.get("machine", {}).get("measured", {})
        unfinished = [part.name for part in self._parts if part.name not in self.reports]
        summary = {
            **self._about,
            "machine": machine,
            "limit_seconds": self._limit_seconds,
            "seconds": seconds,
            "exit_code": self._exit_code() or (LATE_CODE if unfinished else PASSED_CODE),
            "unfinished": unfinished,
            "could_not_do": reasons(self.reports),
            "parts": self.reports,
        }
        write_json(self._output / "gpu_check.json", summary)
        about = ", ".join(f"{name} {value}" for name, value in {**self._about, **machine}.items())
        head = [f"GPU check: {about}; {seconds} s of {self._limit_seconds:.0f}", *summary_lines(self.reports)]
        head += [f"unfinished: {', '.join(unfinished)}"] if unfinished else []
        body = [line for name, found in self.reports.items() for line in ["", *part_lines(name, found)]]
        write_text(self._output / "gpu_check.txt", "\n".join([*head, *body]) + "\n")


def end_session(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Kills a part and all processes that it started, which are in its session, and waits so long for its end."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    for member in _members(process.pid):  # ninja, for one, gives each compiler a process group of its own
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process that waits for a broken device ends when the device lets it
        process.wait(seconds)


def _members(session: int) -> list[int]:
    """The processes of a session."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if int(file.read_text(errors="replace").rpartition(")")[2].split()[3]) == session:
                found.append(int(file.parent.name))
    return found
