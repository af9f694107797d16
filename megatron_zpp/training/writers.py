"""Writers of a run: its printer, its files and its points, by rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.config.options import arguments
from megatron_zpp.config.schema import Config
from megatron_zpp.monitor.jsonl import JsonLinesWriter
from megatron_zpp.monitor.logging import RankPrinter
from megatron_zpp.monitor.output import Output
from megatron_zpp.monitor.progress_file import ProgressFile
from megatron_zpp.monitor.scalars import ScalarWriter
from megatron_zpp.monitor.tensorboard import TensorboardWriter
from megatron_zpp.monitor.wandb_writer import WandbRun, WandbWriter
from megatron_zpp.training.instruments import Instruments
from megatron_zpp.training.save_lock import SaveLock
from megatron_zpp.training.startup_checks import check_writable


@dataclass(frozen=True)
class Writers:
    """Writers of this rank: files on rank 0, points (TensorBoard, Weights & Biases) on the last rank.

    Those that are an Output may fail without ending the run. save_lock: of the --save folder.
    """

    printer: RankPrinter
    instruments: Instruments
    save_lock: SaveLock
    json_lines: Output[JsonLinesWriter] | None
    progress_file: Output[ProgressFile] | None
    scalars: tuple[Output[ScalarWriter], ...]

    def close(self) -> None:
        """Writes what is buffered, and tells which outputs are incomplete."""
        if self.json_lines is not None:
            self.json_lines.attempt(JsonLinesWriter.close)
        for scalars in self.scalars:
            scalars.attempt(lambda writer: writer.close())
        self.instruments.close()
        for output in (self.json_lines, self.progress_file, *self.scalars):
            if output is not None:
                output.tell_if_incomplete()


def open_writers(config: Config, printer: RankPrinter, instruments: Instruments, save_lock: SaveLock) -> Writers:
    """Writers that the flags ask for on this rank. Raises UserError if it cannot write to one of their folders."""
    logging = config.logging
    if config.checkpoint.save is not None:
        check_writable("--save", Path(config.checkpoint.save), printer.rank)
    if logging.tensorboard_dir is not None:
        check_writable("--tensorboard-dir", Path(logging.tensorboard_dir), printer.rank)
    if config.profiling.profile_dir is not None and instruments.traces is not None:
        check_writable("--profile-dir", Path(config.profiling.profile_dir), printer.rank)
    if instruments.memory_history is not None:
        check_writable("--memory-snapshot-path", Path(config.profiling.memory_snapshot_path).parent, printer.rank)
    json_lines, progress_file = None, None
    if logging.log_jsonl is not None and printer.rank == 0:
        path = Path(logging.log_jsonl)
        json_lines = Output(f"--log-jsonl {path}", lambda: JsonLinesWriter(path), 0)
    if config.checkpoint.save is not None and logging.log_progress and printer.rank == 0:
        file = ProgressFile(Path(config.checkpoint.save), os.environ.get("SLURM_JOB_ID", ""), printer.world_size)
        progress_file = Output(f"--log-progress {file.path}", lambda: file, 0)
    scalars = tuple(_scalar_writers(config, printer.rank)) if printer.rank == printer.world_size - 1 else ()
    return Writers(printer, instruments, save_lock, json_lines, progress_file, scalars)


def _scalar_writers(config: Config, rank: int) -> Iterator[Output[ScalarWriter]]:
    logging = config.logging
    if logging.tensorboard_dir is not None:
        folder, queue_size = logging.tensorboard_dir, logging.tensorboard_queue_size
        yield Output(f"--tensorboard-dir {folder}", lambda: TensorboardWriter(folder, queue_size, arguments(config)), rank)
    if logging.wandb_project is not None:
        kept = Path(config.checkpoint.save) / "wandb" if config.checkpoint.save is not None else None
        directory = kept if logging.wandb_save_dir is None else Path(logging.wandb_save_dir)
        if directory is not None:
            check_writable("--wandb-save-dir", directory, rank)
        run = WandbRun(logging.wandb_project, logging.wandb_entity, logging.wandb_exp_name, directory)
        yield Output(f"--wandb-project {run.project} (Weights & Biases)", lambda: WandbWriter(run, arguments(config)), rank)
