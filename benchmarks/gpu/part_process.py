"""Runs one part in this process, and keeps its outcome in a file from its start on."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.files import write_json
from benchmarks.gpu.outcome import FAILED, NOT_DONE, UNFINISHED, NotDone, Outcome

LAST_LINES = 30  # of a traceback


def run_part(name: str, seconds: float, file: Path) -> None:
    """Writes the outcome of benchmarks.gpu.`name` to `file` after every change, and at last with its status."""
    time = Deadline(seconds)  # before torch is imported, which takes seconds; the runner counts them
    outcome = Outcome(folder=file.parent.parent, keep=lambda now: write_json(file, now.as_json(UNFINISHED)))
    outcome.keep(outcome)
    try:
        importlib.import_module(f"benchmarks.gpu.{name}").run(time, outcome)
        status = outcome.end()
    except NotDone as reason:
        outcome.omit(str(reason))
        status = FAILED if outcome.failures else NOT_DONE
    except BaseException as error:
        outcome.failures.append(f"{type(error).__name__}: {error}"[:1000])
        outcome.say(*traceback.format_exc().splitlines()[-LAST_LINES:])
        status = FAILED
    write_json(file, outcome.as_json(status))
