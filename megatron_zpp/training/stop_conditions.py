"""Conditions that end a run before its last iteration, on every rank at the same step."""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from types import FrameType

from megatron_zpp.config.schema import TrainingConfig
from megatron_zpp.system import process_start
from megatron_zpp.system.interrupts import Interrupts
from megatron_zpp.system.user_error import UserError


class StopRequest(enum.IntFlag):
    """Reasons of a rank to end the run. Ranks exchange their requests once per step, and each rank follows all of them."""

    NONE = 0
    SIGNAL = 1
    DURATION = 2
    KILL_SWITCH = 4

    @staticmethod
    def of_ranks(requests: Iterable[float]) -> StopRequest:
        """Union of the requests of all ranks, which were exchanged as numbers."""
        return reduce(or_, (StopRequest(int(request)) for request in requests))


class StopConditions:
    """Conditions on this rank: a signal has arrived, the time of --exit-duration-in-mins is over, or rank 0 sees --kill-switch-file.

    The time counts from the start of the process, because the limit of a job includes imports, indices and loading.
    Replaces the handlers of signals. `close` restores them; `ignore_signals` ends a run that has done what they ask for.
    """

    def __init__(self, training: TrainingConfig, rank: int = 0) -> None:
        self._has_signal = False
        self._interrupts = Interrupts()
        self._kill_switch = kill_switch(training, rank)
        minutes = training.exit_duration_in_mins
        self._deadline = None if minutes is None else process_start.MONOTONIC_SECONDS + 60.0 * minutes
        self._is_main = threading.current_thread() is threading.main_thread()
        signals = signals_to_handle(training) if self._is_main else ()
        self._before = {number: signal.signal(number, self._note_signal) for number in signals}

    def request(self) -> StopRequest:
        """Conditions that hold now on this rank."""
        request = StopRequest.SIGNAL if self._has_signal else StopRequest.NONE
        if self._deadline is not None and time.monotonic() >= self._deadline:
            request |= StopRequest.DURATION
        if self._kill_switch is not None and _exists(self._kill_switch):
            request |= StopRequest.KILL_SWITCH
        return request

    def ignore_signals(self) -> None:
        """Ignores the signals, and Ctrl-C, until the process has ended: a default handler would kill a run that has just saved."""
        for number in {*self._before, signal.SIGINT} if self._is_main else ():
            signal.signal(number, signal.SIG_IGN)
        self._before = {}

    def close(self) -> None:
        """Restores the handlers of signals; does nothing after `ignore_signals`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupts.is_first(number)  # ends the process if it is a second Ctrl-C
        self._has_signal = True


def kill_switch(training: TrainingConfig, rank: int) -> Path | None:
    """File that ends the run, on rank 0; None on all other ranks, because one look per step into a shared folder is enough."""
    return Path(training.kill_switch_file) if training.kill_switch_file is not None and rank == 0 else None


def check_kill_switch(training: TrainingConfig, rank: int) -> None:
    """Raises UserError on rank 0 if the file that ends the run exists already."""
    path = kill_switch(training, rank)
    if path is not None and path.exists():
        raise UserError(f"--kill-switch-file {path} is there, so nothing is trained; remove the file to train.")


def _exists(path: Path) -> bool:
    """False also if the file system does not answer, such as a network drive with a short outage."""
    try:
        return path.exists()
    except OSError:
        return False


def signals_to_handle(training: TrainingConfig) -> Sequence[signal.Signals]:
    """What ends the run; empty without --exit-signal-handler.

    Beside --exit-signal: SIGUSR1, which Slurm can send ahead of the time limit, and SIGINT and SIGTERM, one of which a launcher sends for
    Ctrl-C.
    """
    if not training.exit_signal_handler:
        return ()
    return tuple(dict.fromkeys([signal.Signals[training.exit_signal], signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]))


def reason_for_stopping(requests: StopRequest, iteration: int, training: TrainingConfig) -> str | None:
    """Text that says why the run ends after `iteration`, before its last one; None if it continues."""
    if StopRequest.SIGNAL in requests:
        return (
            f"exiting program after receiving {' or '.join(number.name for number in signals_to_handle(training))} at iteration {iteration}"
        )
    if StopRequest.KILL_SWITCH in requests:
        return f"exiting program because {training.kill_switch_file} is there at iteration {iteration}"
    if StopRequest.DURATION in requests:
        return f"exiting program after {training.exit_duration_in_mins} minutes at iteration {iteration}"
    if training.exit_interval is not None and iteration % training.exit_interval == 0:
        return f"exiting program at iteration {iteration}"
    return None
