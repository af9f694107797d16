"""The checkpoints of a run, and what it tells of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.engine_state import RunState, manifest_of, share_of
from megatron_zpp.checkpoint.saver import CheckpointSaver, SavedCheckpoint, SaveOptions
from megatron_zpp.config.schema import GROUPS, PLAN_GROUP, CheckpointConfig, Config
from megatron_zpp.monitor.logging import RankPrinter
from megatron_zpp.monitor.progress_file import ProgressFile
from megatron_zpp.training.progress import Progress
from megatron_zpp.zero.engine import ZeroEngine


class RunSaver:
    """Saves a run under --save, or nothing without it. Every rank must make the same calls.

    progress_file: is told of what was saved; None on all ranks but one.
    """

    def __init__(
        self, config: Config, engine: ZeroEngine, padded_vocab_size: int, printer: RankPrinter, progress_file: ProgressFile | None
    ) -> None:
        self._directory = config.checkpoint.save
        self._with_moments = not config.checkpoint.no_save_optim
        self._flags = {**flags_by_group(config), "padded_vocab_size": padded_vocab_size}
        self._engine = engine
        self._printer = printer
        self._progress_file = progress_file
        self._saver = None
        if self._directory is not None:
            share = share_of(engine, with_moments=self._with_moments)
            self._saver = CheckpointSaver(Path(self._directory), share, _options(config.checkpoint))

    def save(self, progress: Progress) -> None:
        """Saves what --save asks for; with --async-save the state must not change before `wait_for_copy`."""
        if self._saver is None:
            return
        under_way = self._saver.iteration_under_way
        if under_way is not None:
            self._printer.on_first(f"waiting for the checkpoint at iteration {under_way:7d}, which is still being written")
        self.finish()
        self._printer.on_first(f"saving checkpoint at iteration {progress.iteration:7d} to {self._directory}")
        state = RunState(progress.iteration, progress.consumed_samples, progress.scheduled_samples, self._flags)
        self._tell(self._saver.save(manifest_of(self._engine, state, with_moments=self._with_moments)))

    def wait_for_copy(self) -> None:
        """Returns when no checkpoint needs the state as it is; to be called before every update of it."""
        if self._saver is not None:
            self._saver.wait_for_copy()

    def check(self) -> None:
        """Tells of a checkpoint that has come to its end, and raises what went wrong with it; to be called after every step."""
        if self._saver is not None:
            self._tell(self._saver.check())

    def finish(self) -> None:
        """Returns when no checkpoint is being written any more."""
        if self._saver is not None:
            self._tell(self._saver.finish())

    def _tell(self, saved: SavedCheckpoint | None) -> None:
        if saved is None:
            return
        gigabytes = saved.nbytes / 2**30
        lines = [
            f"  successfully saved checkpoint at iteration {saved.iteration:7d} to {self._directory}",
            f"Checkpoint Save GB: {gigabytes:.3f}, GB/Sec: {gigabytes / saved.seconds:.3f}, Latency(second): {saved.seconds:.3f}",
            *(f"WARNING: could not delete the checkpoint at iteration {kept}: it is being read, or guarded" for kept in saved.not_deleted),
        ]
        self._printer.on_first("\n".join(lines))
        if self._progress_file is not None:
            self._progress_file.checkpoint_is_saved(saved.iteration)


def flags_by_group(config: Config) -> dict[str, Any]:
    """The resolved configuration as a checkpoint keeps it."""
    return {group: asdict(getattr(config, group)) for group in GROUPS if group != PLAN_GROUP}


def _options(checkpoint: CheckpointConfig) -> SaveOptions:
    return SaveOptions(checkpoint.async_save, checkpoint.keep_last, checkpoint.save_retain_interval)
