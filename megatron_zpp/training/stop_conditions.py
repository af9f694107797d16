"""When a run is to end before its last iteration, on every rank at the same step."""

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
from megatron_zpp.monitor import process_start


class StopRequest(enum.IntFlag):
    """Reasons of a rank to end the run. Ranks exchange their requests once per step, and each rank follows all of them."""

    NONE = 0
    SIGNAL = 1
    DURATION = 2
    KILL_SWITCH = 4

    @staticmethod
    def of_ranks(requests: Iterable[float]) -> StopRequest:
        """All requests as one. requests: of each rank, as numbers."""
        return reduce(or_, (StopRequest(int(request)) for request in requests))


class StopConditions:
    """Wishes of this rank: a signal has come, the time of --exit-duration-in-mins is over, or rank 0 sees --kill-switch-file.

    The time counts from the start of the process: whoever limits a job means all of it, imports, indices and loading included.
    Takes over the signals while it lives; `close` gives them back.
    """

    def __init__(self, training: TrainingConfig, rank: int = 0) -> None:
        self._has_signal = False
        self._kill_switch = kill_switch(training, rank)
        minutes = training.exit_duration_in_mins
        self._deadline = None if minutes is None else process_start.MONOTONIC_SECONDS + 60.0 * minutes
        is_main = threading.current_thread() is threading.main_thread()
        signals = signals_to_handle(training) if is_main else ()
        self._before = {number: signal.signal(number, self._take_note) for number in signals}

    def request(self) -> StopRequest:
        """What this rank wants now."""
        request = StopRequest.SIGNAL if self._has_signal else StopRequest.NONE
        if self._deadline is not None and time.monotonic() >= self._deadline:
            request |= StopRequest.DURATION
        if self._kill_switch is not None and _is_there(self._kill_switch):
            request |= StopRequest.KILL_SWITCH
        return request

    def close(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        self._has_signal = True


def kill_switch(training: TrainingConfig, rank: int) -> Path | None:
    """The file that ends the run, for rank 0; None for all others: one look per step into a shared folder is enough."""
    return Path(training.kill_switch_file) if training.kill_switch_file is not None and rank == 0 else None


def check_kill_switch(training: TrainingConfig, rank: int) -> None:
    """Nothing, where the file that ends runs is not there yet. Raises ValueError on rank 0 where it is."""
    path = kill_switch(training, rank)
    if path is not None and path.exists():
        raise ValueError(f"--kill-switch-file {path} is there, so nothing is trained; remove the file to train.")


def _is_there(path: Path) -> bool:
    """False also where nobody can tell, as on a network drive that is away for a moment."""
    try:
        return path.exists()
    except OSError:
        return False


def signals_to_handle(training: TrainingConfig) -> Sequence[signal.Signals]:
    """--exit-signal, and SIGUSR1, which Slurm is asked to send ahead of the end of a job's time; none without --exit-signal-handler."""
    if not training.exit_signal_handler:
        return ()
    return tuple({signal.Signals[training.exit_signal], signal.SIGUSR1})


def reason_for_stopping(requests: StopRequest, iteration: int, training: TrainingConfig) -> str | None:
    """Why the run ends after `iteration`, before its last one; None where it goes on."""
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
