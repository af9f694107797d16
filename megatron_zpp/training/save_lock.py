"""The lock of the --save folder in a run: the first rank of each disk holds it from the start of the run to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_zpp.checkpoint.disk import Disk
from megatron_zpp.checkpoint.folders import check_latest_can_move
from megatron_zpp.checkpoint.parts import finish_interrupted_save
from megatron_zpp.checkpoint.run_lock import Job, RunLock, take_lock
from megatron_zpp.config.schema import Config
from megatron_zpp.parallel.initialize import StartupError, World, joined_errors
from megatron_zpp.parallel.launch import SchedulerJob
from megatron_zpp.system.owner import own_token
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.startup_checks import check_writable

LOCK_KEY = "lock of --save"


def disk_of(config: Config, world: World) -> Disk:
    """The disk of checkpoints of this rank. Every rank must call it."""
    if not config.checkpoint.node_local_checkpoints or config.distributed.ranks_per_node == world.world_size:
        return Disk.of_all(world.rank, world.world_size)
    alone = Disk(world.rank, world.world_size, config.distributed.ranks_per_node, config.checkpoint.save_copies)
    firsts = [alone.ranks_of(index)[0] for index in range(alone.count)]
    return replace(
        alone,
        firsts=world.messages_among(firsts),
        firsts_in_background=world.messages_among(firsts, in_background=True, both_ways=alone.copies > 1),
        limit_seconds=world.collective_timeout.total_seconds(),
    )


class SaveLock:
    """Makes this run the only one that saves into its --save folder; without --save it does nothing.

    disk: that of this rank, known when the lock is taken.
    """

    def __init__(self, save: str | None, job: SchedulerJob, world: World) -> None:
        self._folder = None if save is None else Path(save)
        self._job = job
        self.world = world
        self._held: RunLock | None = None
        self.disk: Disk | None = None

    def take(self, disk: Disk, announce: Callable[[str], None]) -> None:
        """Takes the lock, and ends a save of an earlier run that was interrupted between two disks. Every rank must call it.

        Raises StartupError on every rank if another run saves there, or if the first rank of a disk cannot write there.
        """
        self.disk = disk
        if self._folder is None:
            return
        error = ""
        others = frozenset(self.world.gather_texts(own_token())) - {own_token()} if disk.count > 1 else frozenset()
        with self.world.agreement("looking whether another run saves into --save", announce):
            if disk.is_first:
                error = self._take(self._folder, disk, others, announce)
        errors = self.world.gather_texts(error)
        if any(errors):
            raise StartupError(errors[0] if disk.count == 1 else joined_errors(errors))
        if disk.count > 1:
            self._finish_interrupted_save(self._folder, disk, announce)

    def check(self) -> None:
        """Raises CheckpointError on the first rank of a disk if its lock was lost."""
        if self._held is not None:
            self._held.check()

    def release(self) -> None:
        """Lets other runs save there; returns when the lock is gone. Two threads may call it at the same time."""
        if self._held is not None:
            self._held.release()

    def _finish_interrupted_save(self, folder: Path, disk: Disk, announce: Callable[[str], None]) -> None:
        finished: list[str] = []
        with self.world.agreement():
            if disk.is_first:
                finished = finish_interrupted_save(folder, disk)
        for rank, names in enumerate(self.world.gather_texts(", ".join(finished))):
            if names:
                announce(f"an earlier run ended before the disk of rank {rank} had {names} under this name; it has it now")

    def _take(self, folder: Path, disk: Disk, others: frozenset[str], announce: Callable[[str], None]) -> str:
        """Takes the lock, and tells later starts of this job, which may run on another machine. Returns the text of an error, or ""."""
        key = f"{LOCK_KEY} {disk.index}"
        try:
            check_writable("--save", folder, self.world.rank)
            check_latest_can_move("--save", folder)
            job = Job(self._job.name, self._job.restarts, self.world.recall(key), own_processes=others)
            self._held = take_lock(folder, job, announce)
        except UserError as error:
            return str(error)
        self.world.remember(key, self._held.holder.id)
        return ""
