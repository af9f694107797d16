"""Runs the training script with several sets of flags, one after the other in the same processes, and reads what they log."""

from __future__ import annotations

import json
import tempfile
import time as clock
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.rank_processes import POLL_SECONDS, Ranks, Sharing, in_words, write_job

PROGRAM = ("-m", "benchmarks.gpu.rank_program")
MARK_SECONDS = 5.0
START_SECONDS = 45.0  # of torch, CUDA and NCCL, on a busy machine


@dataclass(frozen=True)
class Entry:
    """Flags of one run."""

    name: str
    flags: str


@dataclass(frozen=True)
class Finished:
    """records: what the run wrote to --log-jsonl. errors: what the ranks said if it did not end well, else empty.

    is_late: whether it did not end in time. Ranks that wait for each other fail earlier, by --distributed-timeout-minutes 1.
    """

    entry: Entry
    records: list[dict[str, Any]]
    errors: list[str]
    is_late: bool = False

    @property
    def losses(self) -> list[list[float]]:
        """Loss and gradient norm of every iteration, unrounded."""
        return [[record["lm_loss"], record["grad_norm"]] for record in self.records if "lm_loss" in record]

    @property
    def validation_losses(self) -> list[float]:
        return [record["validation_loss"] for record in self.records if "validation_loss" in record]


def run_entries(
    entries: Sequence[Entry],
    world_size: int,
    sharing: Sharing,
    time: Deadline,
    *,
    run_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Finished]:
    """Yields each run when it has ended. Ends early, without the remaining ones, when the time is over.

    run_seconds: a run that takes longer is late. One that does not end well after others in the same processes is tried again in new ones.
    """
    waiting = list(entries)
    while waiting and time.has(run_seconds / 4):
        with tempfile.TemporaryDirectory() as name:
            done = 0
            for finished in _in_one_world(waiting, world_size, sharing, time, run_seconds, Path(name), environment or {}):
                if finished.errors and done > 0:
                    break
                yield finished
                done += 1
                if finished.errors:
                    break
            if done == 0:
                return  # the time is over
            waiting = waiting[done:]


def _in_one_world(
    entries: Sequence[Entry],
    world_size: int,
    sharing: Sharing,
    time: Deadline,
    run_seconds: float,
    folder: Path,
    environment: Mapping[str, str],
) -> Iterator[Finished]:
    """Yields the runs up to the first that fails, or until the time is over."""
    job = folder / "job.json"
    logs = [folder / f"run{index}.jsonl" for index in range(len(entries))]
    write_job(job, [[*entry.flags.split(), "--log-jsonl", str(log)] for entry, log in zip(entries, logs, strict=True)])
    ranks = Ranks([*PROGRAM, str(job)], world_size, sharing, folder, environment)
    try:
        for index, (entry, log) in enumerate(zip(entries, logs, strict=True)):
            limit = Deadline(run_seconds + (START_SECONDS if index == 0 else 0.0))
            marks = [job.with_name(f"{job.name}.{index}.{rank}") for rank in range(world_size)]
            while not all(mark.exists() for mark in marks) and not any(ranks.codes()) and limit.has(POLL_SECONDS):
                if not time.has(POLL_SECONDS):
                    return
                clock.sleep(POLL_SECONDS)
            # A rank may have failed in the next run already, while another has yet to make its mark of this one.
            grace = Deadline(MARK_SECONDS)
            while any(ranks.codes()) and None in ranks.codes() and not all(mark.exists() for mark in marks) and grace.has(POLL_SECONDS):
                clock.sleep(POLL_SECONDS)
            codes = [mark.read_text() for mark in marks if mark.exists()]
            if codes == ["0"] * world_size:
                yield Finished(entry, _records(log), [])
                continue
            is_late = set(codes) <= {"0"} and not any(ranks.codes())  # a rank that has failed may take long to disappear
            yield Finished(entry, _records(log), in_words(ranks.wait(Deadline(2.0))), is_late)
            return
    finally:
        ranks.end()


def _records(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
