"""Runs the commands of all hosts. Signals are forwarded to every host; the first host that fails ends the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from launching.host_commands import HostCommand

# The signal that torchrun gets for each signal. It does not handle SIGUSR1: it would end at once and leave its ranks running.
FORWARDED = {
    signal.SIGINT: "INT",
    signal.SIGTERM: "TERM",
    signal.SIGHUP: "TERM",
    signal.SIGUSR1: "TERM",
    signal.SIGUSR2: "TERM",
}
POLL_SECONDS = 0.1
SSH_FAILURE = 255


class HostProcesses:
    """Starts all hosts and handles the signals of this process. A second signal ends the launcher, and so the ranks of every host."""

    def __init__(self, commands: Sequence[HostCommand]) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._interrupted_by = 0
        self._all_are_started = False
        for number in FORWARDED:
            signal.signal(number, self._forward)
        for command in commands:
            self._running[command.host] = _started(command)
        self._all_are_started = True
        if self._interrupted_by:
            self._send(FORWARDED[signal.Signals(self._interrupted_by)])

    def wait(self) -> int:
        """Waits for all hosts. Returns the exit code of the first host that failed, or 0."""
        first_failure = 0
        while self._running:
            for host, code in self._ended():
                if code != 0 and first_failure == 0:
                    first_failure = code
                    self._end_others(host, code)
            time.sleep(POLL_SECONDS)
        return first_failure

    def _ended(self) -> list[tuple[str, int]]:
        codes = [(host, process.poll()) for host, process in self._running.items()]
        ended = [(host, code if code >= 0 else 128 - code) for host, code in codes if code is not None]
        for host, _ in ended:
            del self._running[host]
        return ended

    def _end_others(self, host: str, code: int) -> None:
        why = f"{host} cannot be reached, or its ssh was cut (exit code {code})" if code == SSH_FAILURE else f"{host}: exit code {code}"
        others = f"; ending {', '.join(self._running)}" if self._running and not self._interrupted_by else ""
        print(f"launch.py: {why}{others}", file=sys.stderr, flush=True)
        if not self._interrupted_by:
            self._send("TERM")

    def _send(self, name: str) -> None:
        for process in self._running.values():
            _write_input(process, f"{name}\n")

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted_by:
            sys.exit(128 + number)
        self._interrupted_by = number
        if self._all_are_started:
            self._send(FORWARDED[signal.Signals(number)])


def _started(command: HostCommand) -> subprocess.Popen[bytes]:
    # A new session, so that Ctrl-C reaches torchrun only once and does not reach ssh.
    process = subprocess.Popen(command.words, stdin=subprocess.PIPE, start_new_session=True)
    _write_input(process, command.first_input)
    return process


def _write_input(process: subprocess.Popen[bytes], text: str) -> None:
    if process.stdin is None:
        raise RuntimeError(f"process {process.pid} was started without a pipe to its standard input")
    try:
        process.stdin.write(os.fsencode(text))  # the reverse of how variables were decoded
        process.stdin.flush()
    except BrokenPipeError:  # it has just ended; `wait` will see its exit code
        pass
