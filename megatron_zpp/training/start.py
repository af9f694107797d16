"""Start of a run: finds the checkpoint to resume, loads it, describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron_zpp.checkpoint.candidates import (
    Candidates,
    check_may_begin_anew,
    check_pretrained_is_there,
    find_candidates,
    why_nothing_is_loaded,
)
from megatron_zpp.checkpoint.disk import Disk
from megatron_zpp.checkpoint.engine_state import EngineState
from megatron_zpp.checkpoint.folders import saved_iterations
from megatron_zpp.checkpoint.manifest import CheckpointError, DamagedCheckpointError
from megatron_zpp.checkpoint.parts import NotWholeError, Parts, PartsFinder
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.config.batch_schedule import running_schedule
from megatron_zpp.config.flag import spelling_of
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.rules_schedule import check_batches
from megatron_zpp.config.schema import GROUP_OF_FIELD, CheckpointConfig, Config, DilocoConfig
from megatron_zpp.monitor.jsonl import has_earlier_lines
from megatron_zpp.parallel.initialize import StartupError, World
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.training.sample_order import ordered_samples
from megatron_zpp.training.stored_run import StoredRun, schedule_differences

Found = TypeVar("Found")

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
    "zero_quantized_weights",
    "zero_quantized_weight_differences",
    "zero_quantized_gradients",
    "fp16",
    "bf16",
    *(member.name for member in fields(DilocoConfig) if member.name != "diloco_islands"),  # StoredRun has a notice about these
)
VALUES_OF_ISLANDS = ("diloco_start_iteration", "diloco_outer_lr")  # they are None in a run without islands


@dataclass(frozen=True)
class ResumeSource:
    """Checkpoint to start from: an open reader, and the stored run; both None without a checkpoint. notices: of what was passed over."""

    reader: CheckpointReader | None
    stored: StoredRun | None
    notices: tuple[str, ...] = ()

    def close(self) -> None:
        """Closes the reader, so that other runs may delete the checkpoint."""
        if self.reader is not None:
            self.reader.close()


def find_resume_source(config: Config, world: World, disk: Disk, announce: Callable[[str], None] = print) -> ResumeSource:
    """Checkpoint that the flags name, the same on every rank. Every rank must call it.

    announce: receives a line about bytes that come from the disks of other nodes.
    Raises StartupError on every rank if it is missing under --exit-on-missing-checkpoint, damaged, or not the same on all ranks.
    """
    checkpoint = config.checkpoint
    if checkpoint.node_local_checkpoints:
        return _find_in_parts(checkpoint, world, disk, announce)
    candidates = Candidates()
    with world.agreement():
        candidates = find_candidates(checkpoint)
        if not candidates.folders:
            check_may_begin_anew(checkpoint)
    folder, notices = candidates.first, candidates.notices
    _check_same_checkpoint(world, folder.name if folder is not None else "none")
    if folder is None:
        return ResumeSource(None, None)
    if checkpoint.load_last_good_checkpoint:
        reader, found = _last_good(candidates.folders, world)
        notices += found
    else:
        with world.agreement():
            reader = CheckpointReader(folder)
    _check_same_checkpoint(world, reader.identity)
    return ResumeSource(reader, StoredRun.of(checkpoint, reader.folder, reader.manifest), notices)


def load_progress(config: Config, state: EngineState, source: ResumeSource) -> Progress:
    """Loads the checkpoint. Returns the progress that the run continues from; its start without a checkpoint."""
    ordered = ordered_samples(config, source.stored)
    if source.reader is None or source.stored is None:
        return Progress(ordered_samples=ordered)
    stored = source.stored
    if not stored.weights_only:
        # Before copies are filled: it may end full precision, and then they start anew.
        state.engine.start_iteration(stored.manifest.iteration)
    state.load(source.reader, with_moments=stored.gives_moments(config), with_copies=stored.gives_copies(config))
    return stored.progress(ordered)


def with_earlier_samples(config: Config, given: Config, stored: StoredRun | None, launch: Launch) -> Config:
    """The configuration of a run that goes on from samples of other lengths: a length in tokens counts the tokens that they had.

    config: resolved from `given`, the configuration before `resolve`.
    """
    earlier = () if stored is None else stored.earlier_samples
    if all(length == config.model.seq_length for _, length in earlier):
        return config
    return resolve(replace(given, earlier_samples=earlier), launch.world_size, launch.local_world_size)


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


def describe_start(config: Config, source: ResumeSource, progress: Progress, about_data: Sequence[str] = ()) -> str:
    """Text about the loaded checkpoint, the flags that differ from it, checkpoints and a log of another run, and data that nobody named.

    Empty if there is nothing to say.

    Must be called before the run logs its first line. about_data: lines about data that differ from those of the checkpoint's run.
    """
    lines = [_about_checkpoint(config, source, progress), *about_data, _about_save(config, progress), _about_log(config, progress)]
    return "\n".join(filter(None, [*lines, _about_mock_data(config)]))


def _about_mock_data(config: Config) -> str:
    """A warning if the run assumes mock data. It is the last line before training, where no other output hides it."""
    if not config.data.mock_data or "mock_data" in config.given:
        return ""
    return "WARNING: no flag names data, so this run trains on generated tokens; give --data-path, or --mock-data if this is meant"


def _about_save(config: Config, progress: Progress) -> str:
    save = config.checkpoint.save
    latest = 0 if save is None or config.training.skip_train else max(saved_iterations(Path(save)), default=0)
    if latest <= progress.iteration:
        return ""
    remedy = "" if config.checkpoint.load is not None else f". To resume, give --load {save}"
    return (
        f"WARNING: --save {save} holds checkpoints up to iteration {latest}, and this run begins at iteration {progress.iteration}: it "
        f"replaces those of the same iterations, and the latest will be its own{remedy}"
    )


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
        if load is None:
            return ""
        why = why_nothing_is_loaded(Path(load), may_be_misspelled=load != config.checkpoint.save)  # else it is the first job of a run
        return f"WARNING: --load {load} {why}; starting from scratch"
    stored, manifest = source.stored, source.stored.manifest
    loaded = "weights of the checkpoint" if stored.weights_only else "checkpoint"
    lines = [*source.notices, f"  successfully loaded {loaded} from {stored.folder} at iteration {manifest.iteration}"]
    lines += stored.notices(config)
    if progress.iteration >= config.training.train_iters and not config.training.skip_train:
        lines.append(
            f"nothing left to train: --train-iters {config.training.train_iters} is reached; give a higher number to go on, or "
            "--skip-train to evaluate"
        )
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
        is_of_islands = None in (then, now) and name in VALUES_OF_ISLANDS
        if name in theirs.get(group, {}) and then != now and not is_of_islands:
            differing.append(f"{spelling_of(name)} {then} there and {now} here")
    return differing


def _find_in_parts(checkpoint: CheckpointConfig, world: World, disk: Disk, announce: Callable[[str], None]) -> ResumeSource:
    """The same for a checkpoint in parts on the disks of the nodes."""
    everyone = world.messages_among(range(world.world_size))
    try:
        may_be_older = checkpoint.load_last_good_checkpoint
        for directory, step in ((checkpoint.load, checkpoint.ckpt_step), (checkpoint.pretrained_checkpoint, None)):
            if directory is None:
                continue
            finder = PartsFinder(Path(directory), disk, everyone)
            names, notice = finder.candidates(step, may_be_older=may_be_older)
            if names:
                parts, notices = _whole_one(finder, names, may_be_older=may_be_older)
                with world.agreement():
                    reader = finder.open(parts, announce)
                stored = StoredRun.of(checkpoint, parts.folder, parts.manifest)
                notices += tuple(f"WARNING: {text}" for text in parts.notices)
                return ResumeSource(reader, stored, tuple(filter(None, [notice, *notices])))
        check_pretrained_is_there(checkpoint)
        check_may_begin_anew(checkpoint)
    except CheckpointError as error:  # all of them are alike on every rank
        raise StartupError(str(error)) from error
    return ResumeSource(None, None)


def _whole_one(finder: PartsFinder, names: Sequence[str], *, may_be_older: bool) -> tuple[Parts, tuple[str, ...]]:
    """The first of the named checkpoints that is whole, and warnings about those before it, which only may_be_older allows.

    With may_be_older it is verified. Raises CheckpointError if there is none.
    """
    if not may_be_older:
        try:
            return finder.find(names[0]), ()
        except NotWholeError as error:
            raise CheckpointError(f"{error}; {finder.remedy(names[0])}") from error

    def look(name: str) -> tuple[Parts | None, Sequence[str]]:
        try:
            return finder.verified(finder.find(name))
        except NotWholeError as error:
            return None, [str(error)]

    return _first_good(finder.directory, names, look)


def _last_good(folders: Sequence[Path], world: World) -> tuple[CheckpointReader, tuple[str, ...]]:
    """A reader of the first undamaged one of rank 0's folders, and warnings about those before it.

    Each rank reads its share of the files.
    """

    def look(name: str) -> tuple[CheckpointReader | None, Sequence[str]]:
        reader, own_findings = _verified(folders[0].with_name(name), world)
        by_rank = world.gather_texts("\n".join(own_findings))
        findings = sorted({finding for text in by_rank for finding in text.splitlines()})
        if findings and reader is not None:
            reader.close()
        return reader, findings

    of_rank_0 = world.gather_texts("\n".join(folder.name for folder in folders))[0]  # another machine may still see deleted folders
    return _first_good(folders[0].parent, of_rank_0.splitlines(), look)


def _first_good(
    directory: Path, names: Sequence[str], look: Callable[[str], tuple[Found | None, Sequence[str]]]
) -> tuple[Found, tuple[str, ...]]:
    """The first of the named checkpoints with which nothing is wrong, and warnings about those before it.

    look: returns a checkpoint by its name, if there is one, and what is wrong with it. Raises StartupError if none is good.
    """
    notices: list[str] = []
    for name in names:
        found, findings = look(name)
        if found is not None and not findings:
            return found, tuple(f"WARNING: passed over, because {finding}" for finding in notices)
        notices += findings
    raise StartupError(f"no checkpoint in {directory} is good: {'; '.join(notices)}; name another folder, or an empty one to start anew")


def _verified(folder: Path, world: World) -> tuple[CheckpointReader | None, Sequence[str]]:
    """A reader of the checkpoint, unless it cannot be opened, and what this rank finds wrong with it."""
    try:
        reader = CheckpointReader(folder)
    except DamagedCheckpointError as error:
        return None, [error.finding]
    except CheckpointError as error:
        return None, [str(error)]
    return reader, list(reader.verify(reader.manifest.files[world.rank :: world.world_size]))


def _check_same_checkpoint(world: World, seen: str) -> None:
    """Raises StartupError if two ranks see different checkpoints, and names the ranks."""
    by_rank = world.gather_texts(seen)
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            raise StartupError(
                f"the ranks see different checkpoints: {by_rank[0].strip()} on rank 0 and {other.strip()} on rank {rank}; "
                "--load must be a folder of one file system that all ranks share"
            )
