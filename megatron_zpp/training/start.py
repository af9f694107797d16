"""Start of a run: finds the checkpoint to resume, loads it, describes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.checkpoint_args import checkpoint_folder
from megatron_zpp.checkpoint.engine_state import load_engine
from megatron_zpp.checkpoint.folders import older_checkpoints
from megatron_zpp.checkpoint.manifest import CheckpointError, DamagedCheckpointError
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.config.batch_schedule import running_schedule
from megatron_zpp.config.flag import spelling_of
from megatron_zpp.config.rules_schedule import check_batches
from megatron_zpp.config.schema import GROUP_OF_FIELD, Config
from megatron_zpp.monitor.jsonl import has_earlier_lines
from megatron_zpp.parallel.initialize import StartupError, World, gather_texts
from megatron_zpp.training.progress import Progress
from megatron_zpp.training.stored_run import StoredRun, schedule_differences
from megatron_zpp.zero.engine import ZeroEngine

# A resumed run may change these flags, but may also do so by accident.
FLAGS_OF_A_CONTINUED_RUN = (
    "seed",
    "seq_length",
    "global_batch_size",
    "rampup_batch_size",
    "step_batch_size_schedule",
    "decrease_batch_size_if_needed",
    "train_iters",
    "iterations_to_skip",
    "data_path",
    "train_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "split",
    "blend_normalization",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "tokenizer_type",
    "legacy_tokenizer",
    "null_tokenizer_eod_id",
    "attention_dropout",
    "hidden_dropout",
    "clip_grad",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
)


@dataclass(frozen=True)
class ResumeSource:
    """Checkpoint to start from: an open reader, and the stored run; both None without a checkpoint. notices: of newer, damaged ones."""

    reader: CheckpointReader | None
    stored: StoredRun | None
    notices: tuple[str, ...] = ()

    def close(self) -> None:
        """Closes the reader, so that other runs may delete the checkpoint."""
        if self.reader is not None:
            self.reader.close()


def find_resume_source(config: Config, world: World) -> ResumeSource:
    """Checkpoint that the flags name, the same on every rank. Every rank must call it.

    Raises StartupError on every rank if it is missing under --exit-on-missing-checkpoint, damaged, or not the same on all ranks.
    """
    checkpoint = config.checkpoint
    folder: Path | None = None
    notices: tuple[str, ...] = ()
    with world.agreement():
        folder = checkpoint_folder(checkpoint)
        if folder is None and checkpoint.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"--load {checkpoint.load} holds no checkpoint and --exit-on-missing-checkpoint is given; correct the path"
            )
    _check_same_checkpoint(folder.name if folder is not None else "none")
    if folder is None:
        return ResumeSource(None, None)
    if checkpoint.load_last_good_checkpoint:
        folder, notices = _last_good(folder, world)
    with world.agreement():
        reader = CheckpointReader(folder)
    _check_same_checkpoint(reader.identity)
    return ResumeSource(reader, StoredRun.of(checkpoint, folder, reader.manifest), notices)


def load_progress(config: Config, engine: ZeroEngine, source: ResumeSource) -> Progress:
    """Loads the checkpoint into the engine. Returns the progress that the run continues from; zero without a checkpoint."""
    if source.reader is None or source.stored is None:
        return Progress()
    manifest = source.stored.manifest
    if not source.stored.weights_only:
        engine.start_iteration(manifest.iteration)  # before copies are filled: it may end full precision, and then they start anew
    load_engine(engine, source.reader, with_moments=source.stored.gives_moments(config), with_copies=source.stored.gives_copies(config))
    if source.stored.weights_only:
        return Progress()
    return Progress(manifest.iteration, manifest.consumed_samples, manifest.run["scheduled_samples"])


def with_remaining_batches(config: Config, progress: Progress, sample_groups: int) -> Config:
    """Configuration whose --train-iters is the iteration at which --train-samples end, if the run continues from `progress`.

    Batches may have had other sizes before. Raises FlagError if one of the batches from there on does not divide among the ranks.
    """
    batches = running_schedule(config, sample_groups)
    check_batches(config, batches, progress.consumed_samples)
    train_samples = config.training.train_samples
    if train_samples is None:
        return config
    remaining = batches.iterations_within(train_samples, progress.consumed_samples)
    return config.with_values(train_iters=progress.iteration + remaining)


def describe_start(config: Config, source: ResumeSource, progress: Progress) -> str:
    """Text about the loaded checkpoint, the flags that differ from it, and a log of another run; empty if there is nothing to say.

    Must be called before the run logs its first line.
    """
    return "\n".join(filter(None, [_about_checkpoint(config, source, progress), _about_log(config, progress)]))


def _about_log(config: Config, progress: Progress) -> str:
    log = config.logging.log_jsonl
    if log is None or progress.iteration > 0 or config.training.skip_train or not has_earlier_lines(log):
        return ""
    return (
        f"WARNING: --log-jsonl {log} has lines of an earlier run, and this run does not resume it. The lines of both are kept; "
        "plot_run.py, compare_runs.py and watch_run.py show those of this run"
    )


def _about_checkpoint(config: Config, source: ResumeSource, progress: Progress) -> str:
    if source.stored is None:
        load = config.checkpoint.load
        return "" if load is None else f"WARNING: --load {load} holds no checkpoint; starting from scratch"
    stored, manifest = source.stored, source.stored.manifest
    loaded = "weights of the checkpoint" if stored.weights_only else "checkpoint"
    lines = [*source.notices, f"  successfully loaded {loaded} from {stored.folder} at iteration {manifest.iteration}"]
    lines += stored.notices(config)
    if progress.iteration >= config.training.train_iters and not config.training.skip_train:
        lines.append(f"nothing left to train: --train-iters {config.training.train_iters} is reached; give a higher number to go on")
    if not stored.weights_only:
        differing = [*flags_that_differ(config, manifest.flags), *schedule_differences(config, manifest.flags)]
        lines += [f"WARNING: the checkpoint's run had other flags: {'; '.join(differing)}"] if differing else []
        if config.checkpoint.use_checkpoint_opt_param_scheduler:
            lines.append("the schedule of learning rate and weight decay is the checkpoint's")
    return "\n".join(lines)


def flags_that_differ(config: Config, theirs: Mapping[str, Any]) -> list[str]:
    """Flags that decide the order of data or the numbers and differ from a checkpoint's, each with both values."""
    differing = []
    for name in FLAGS_OF_A_CONTINUED_RUN:
        group = GROUP_OF_FIELD[name]
        then, now = theirs.get(group, {}).get(name), config.value_of(name)
        then = tuple(then) if isinstance(then, list) else then
        if name in theirs.get(group, {}) and then != now:
            differing.append(f"{spelling_of(name)} {then} there and {now} here")
    return differing


def _last_good(folder: Path, world: World) -> tuple[Path, tuple[str, ...]]:
    """Newest undamaged checkpoint up to `folder`, and warnings about the newer ones. Each rank reads its share of the files."""
    notices: list[str] = []
    for candidate in (folder, *older_checkpoints(folder)):
        findings = sorted({finding for text in gather_texts("\n".join(_findings(candidate, world))) for finding in text.splitlines()})
        if not findings:
            return candidate, tuple(notices)
        notices += [f"WARNING: passed over, because {finding}" for finding in findings]
    raise StartupError(f"no checkpoint is good: {'; '.join(notices)}; start anew without --load, or give another")


def _findings(folder: Path, world: World) -> Iterator[str]:
    try:
        with CheckpointReader(folder) as reader:
            yield from reader.verify(reader.manifest.files[world.rank :: world.world_size])
    except DamagedCheckpointError as error:
        yield error.finding
    except CheckpointError as error:
        yield str(error)


def _check_same_checkpoint(seen: str) -> None:
    """Raises StartupError if two ranks see different checkpoints, and names the ranks."""
    by_rank = gather_texts(seen)
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            raise StartupError(
                f"the ranks see different checkpoints: {by_rank[0].strip()} on rank 0 and {other.strip()} on rank {rank}; "
                "--load must be a folder of one file system that all ranks share"
            )
