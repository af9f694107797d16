"""Writes progress.txt: the jobs of a run, and the checkpoints that each of them saved."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from megatron_zpp.system.output_file import kept_file


class ProgressFile:
    """Appends a line per event to progress.txt in `folder`: time, job, ranks and event, separated by tabs as in Megatron-LM.

    job: the scheduler's id of the job; empty without a scheduler.
    """

    def __init__(self, folder: Path, job: str, world_size: int, *, now: Callable[[], datetime] = datetime.now) -> None:
        self.path = folder / "progress.txt"
        self._job = f"Job ID: {job}\t# GPUs: {world_size}"
        self._now = now

    def job_has_started(self) -> None:
        self._append("Starting job")

    def checkpoint_is_saved(self, iteration: int) -> None:
        self._append(f"Saved checkpoint\tIteration: {iteration}")

    def _append(self, event: str) -> None:
        with open(kept_file(self.path, appends=True), "a", encoding="utf-8") as file:
            file.write(f"{self._now():%Y-%m-%d %H:%M:%S}\t{self._job}\t{event}\n")
