"""The commands of all hosts while they run: signals go to each, and the first that fails ends the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from host_commands import HostCommand

# What each signal is to torchrun, which does not know SIGUSR1: it would end at once, and its ranks would be left behind.
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
    """All hosts at work. Takes over the signals; the second one ends the launcher, and with it the ranks of every host."""

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
        """The exit code of the first host that failed, 0 where none did, after all have ended."""
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
            _tell(process, f"{name}\n")

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted_by:
            sys.exit(128 + number)
        self._interrupted_by = number
        if self._all_are_started:
            self._send(FORWARDED[signal.Signals(number)])


def _started(command: HostCommand) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C must reach torchrun once, and ssh not at all.
    process = subprocess.Popen(command.words, stdin=subprocess.PIPE, start_new_session=True)
    _tell(process, command.first_input)
    return process


def _tell(process: subprocess.Popen[bytes], text: str) -> None:
    if process.stdin is None:
        raise RuntimeError(f"process {process.pid} was started without a pipe to its standard input")
    try:
        process.stdin.write(os.fsencode(text))  # as variables were decoded
        process.stdin.flush()
    except BrokenPipeError:  # it has just ended, and its exit code will be seen
        pass
