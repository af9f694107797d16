"""Checkpoints of a run, and the lines that it prints about them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.engine_state import EngineState
from megatron_zpp.checkpoint.folders import read_latest
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.saver import CheckpointSaver, SavedCheckpoint, SaveOptions
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.config.schema import GROUPS, PLAN_GROUP, Config
from megatron_zpp.training.writers import Writers


class RunSaver:
    """Saves a run under --save; does nothing without it. Every rank must make the same calls.

    state: what is saved. writers: of this rank; its progress file gets a line for every checkpoint, and its lock says whether this run may
    save.
    """

    def __init__(self, config: Config, state: EngineState, padded_vocab_size: int, writers: Writers) -> None:
        checkpoint = config.checkpoint
        self._directory = checkpoint.save
        self._with_moments = not checkpoint.no_save_optim
        self._flags = {**flags_by_group(config), "padded_vocab_size": padded_vocab_size}
        self._state = state
        self._printer = writers.printer
        self._progress_file = writers.progress_file
        self._saver = None
        if self._directory is not None:
            share = state.share(with_moments=self._with_moments)
            lock = writers.save_lock
            options = SaveOptions(checkpoint.async_save, checkpoint.keep_last, checkpoint.save_retain_interval)
            self._saver = CheckpointSaver(
                Path(self._directory), share, options, lock.world.gather_texts, lock.check, lock.disk, self._count_copied
            )

    def save(self, progress: Progress) -> None:
        """Saves a checkpoint. With --async-save the state must not change before `wait_for_copy` returns."""
        if self._saver is None:
            return
        under_way = self._saver.iteration_under_way
        if under_way is not None:
            self._printer.on_first(f"waiting for the checkpoint at iteration {under_way:7d}, which is still being written")
        self.finish()
        self._state.engine.finish_differences()
        self._printer.on_first(f"saving checkpoint at iteration {progress.iteration:7d} to {self._directory}")
        manifest = self._state.manifest(progress, self._flags, with_moments=self._with_moments)
        self._report(self._saver.save(manifest))

    def wait_for_copy(self) -> None:
        """Returns when weights and moments may change. Call it before every update."""
        if self._saver is not None:
            self._saver.wait_for_copy()

    def check(self) -> None:
        """Prints a checkpoint that is complete, and raises the error of one that failed. Call it after every iteration."""
        if self._saver is not None:
            self._report(self._saver.check())

    def finish(self) -> None:
        """Returns when no checkpoint is being written."""
        if self._saver is not None:
            self._report(self._saver.finish())

    def what_is_saved(self) -> str:
        """The checkpoint from which a run that ends now goes on, in words."""
        if self._directory is None:
            return "without --save nothing is kept"
        try:
            latest = read_latest(Path(self._directory))
        except (OSError, ValueError):
            latest = None
        if latest is None:
            return f"{self._directory} has no checkpoint yet (--exit-signal-handler saves before it ends)"
        return (
            f"the last checkpoint in {self._directory} is that of iteration {latest}, and the same command with --load {self._directory} "
            "goes on from there (--exit-signal-handler saves before it ends)"
        )

    def _count_copied(self, nbytes: int) -> None:
        self._state.engine.links.ledger.book(Category.COPIES, Traffic(inter_bytes=nbytes))

    def _report(self, saved: SavedCheckpoint | None) -> None:
        if saved is None:
            return
        gigabytes, copied = saved.nbytes / 2**30, saved.copied_bytes / 2**30
        lines = [
            f"  successfully saved checkpoint at iteration {saved.iteration:7d} to {self._directory}",
            f"Checkpoint Save GB: {gigabytes:.3f}, GB/Sec: {gigabytes / saved.seconds:.3f}, Latency(second): {saved.seconds:.3f}",
            *([f"  copies on the disks of other nodes: {copied:.3f} GB came into node 0"] if copied else []),
            *(
                f"WARNING: could not delete the checkpoint at iteration {kept}: it is being read, or the file system refuses"
                for kept in saved.not_deleted
            ),
        ]
        self._printer.on_first("\n".join(lines))
        if self._progress_file is not None:
            self._progress_file.attempt(lambda file: file.checkpoint_is_saved(saved.iteration))


def flags_by_group(config: Config) -> dict[str, Any]:
    """Resolved configuration in the form that checkpoints keep."""
    return {group: asdict(getattr(config, group)) for group in GROUPS if group != PLAN_GROUP}
