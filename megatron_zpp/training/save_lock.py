"""The lock of the --save folder in a run: rank 0 holds it from the start of the run to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_zpp.checkpoint.folders import check_latest_can_move
from megatron_zpp.checkpoint.run_lock import Job, RunLock, take_lock
from megatron_zpp.parallel.initialize import StartupError, World, gather_texts
from megatron_zpp.parallel.launch import SchedulerJob
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.startup_checks import check_writable

LOCK_KEY = "lock of --save"


class SaveLock:
    """Makes this run the only one that saves into its --save folder; without --save it does nothing."""

    def __init__(self, save: str | None, job: SchedulerJob) -> None:
        self._folder = None if save is None else Path(save)
        self._job = job
        self._held: RunLock | None = None

    def take(self, world: World, announce: Callable[[str], None]) -> None:
        """Raises StartupError on every rank if another run saves there, or if rank 0 cannot write there. Every rank must call it."""
        error = ""
        with world.agreement("looking whether another run saves into --save", announce):
            if self._folder is not None and world.rank == 0:
                error = self._take(self._folder, world, announce)
        if error := gather_texts(error)[0]:
            raise StartupError(error)

    def check(self) -> None:
        """Raises CheckpointError on rank 0 if the lock was lost."""
        if self._held is not None:
            self._held.check()

    def release(self) -> None:
        """Lets other runs save there; returns when the lock is gone. Two threads may call it at the same time."""
        if self._held is not None:
            self._held.release()

    def _take(self, folder: Path, world: World, announce: Callable[[str], None]) -> str:
        """Takes the lock, and tells later starts of this job, which may run on another machine. Returns the text of an error, or ""."""
        try:
            check_writable("--save", folder, world.rank)
            check_latest_can_move("--save", folder)
            self._held = take_lock(folder, Job(self._job.name, self._job.restarts, world.recall(LOCK_KEY)), announce)
        except UserError as error:
            return str(error)
        world.remember(LOCK_KEY, self._held.holder.id)
        return ""
