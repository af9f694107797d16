"""Where a run starts: which checkpoint it takes, with what schedule it goes on, and how far it had come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron_zpp.checkpoint.checkpoint_args import checkpoint_folder
from megatron_zpp.checkpoint.engine_state import load_engine
from megatron_zpp.checkpoint.folders import older_checkpoints
from megatron_zpp.checkpoint.manifest import CheckpointError, DamagedCheckpointError
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.config.batch_schedule import running_schedule
from megatron_zpp.config.options import spelling_of
from megatron_zpp.config.schedule_rules import check_batches
from megatron_zpp.config.schema import GROUP_OF_FIELD, Config, OptimizerConfig, TrainingConfig
from megatron_zpp.parallel.initialize import StartupError, World, gather_texts
from megatron_zpp.training.lr_schedule import LearningRateSchedule
from megatron_zpp.training.metrics import Progress
from megatron_zpp.training.weight_decay import WeightDecaySchedule
from megatron_zpp.zero.engine import ZeroEngine

Group = TypeVar("Group", OptimizerConfig, TrainingConfig)

# A change of one of these is legitimate, and easily made by accident.
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
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "tokenizer_type",
    "attention_dropout",
    "hidden_dropout",
    "clip_grad",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
)
SCHEDULE_FLAGS = {
    "style": "--lr-decay-style",
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "warmup_init_lr": "--lr-warmup-init",
    "warmup_samples": "samples of warmup",
    "decay_samples": "samples to the end of the decay",
    "annealing_style": "--lr-wsd-decay-style",
    "annealing_samples": "samples of annealing",
}
WEIGHT_DECAY_FLAGS = {
    "constant": "--weight-decay",
    "style": "--weight-decay-incr-style",
    "start": "--start-weight-decay",
    "end": "--end-weight-decay",
    "incr_samples": "--weight-decay-incr-samples",
}


@dataclass(frozen=True)
class Origin:
    """The checkpoint to start from, open, or None.

    weights_only: nothing but weights is taken from it. notices: what had to be passed over.
    """

    reader: CheckpointReader | None
    weights_only: bool
    notices: tuple[str, ...] = ()

    def close(self) -> None:
        """Lets other runs delete the checkpoint."""
        if self.reader is not None:
            self.reader.close()


def find_origin(config: Config, world: World) -> Origin:
    """The checkpoint that the flags mean, the same on every rank; every rank must call it.

    Raises StartupError on every rank alike where it is missing against the user's will, damaged, or not the same for all.
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
    _check_same(folder.name if folder is not None else "none")
    if folder is None:
        return Origin(None, weights_only=False)
    if checkpoint.load_last_good_checkpoint:
        folder, notices = _last_good(folder, world)
    with world.agreement():
        reader = CheckpointReader(folder)
    _check_same(reader.identity)
    is_pretrained = checkpoint.load is None or folder.parent != Path(checkpoint.load)
    return Origin(reader, checkpoint.finetune or is_pretrained or reader.is_release, notices)


def with_schedule(config: Config, origin: Origin) -> Config:
    """The configuration, with the checkpoint's schedule where --use-checkpoint-opt-param-scheduler asks for it.

    Raises CheckpointError where a run that goes on has another schedule and no flag says which of the two is meant.
    """
    if origin.reader is None or origin.weights_only or config.training.skip_train:
        return config
    theirs = origin.reader.manifest.flags
    if config.checkpoint.use_checkpoint_opt_param_scheduler:
        return _with_their_schedule(config, theirs)
    differing = list(schedule_differences(config, theirs))
    if not differing or config.checkpoint.override_opt_param_scheduler:
        return config
    raise CheckpointError(
        f"{origin.reader.folder} was saved with another schedule: {'; '.join(differing)}; give the same flags, "
        "--override-opt-param-scheduler to go on with the flags', or --use-checkpoint-opt-param-scheduler to go on with the checkpoint's"
    )


def schedule_differences(config: Config, theirs: Mapping[str, Any]) -> Iterator[str]:
    """What shapes learning rate and weight decay and differs from a checkpoint's flags, each with both values."""
    learning_rates, weight_decays = _their_schedules(theirs)
    here = LearningRateSchedule.from_config(config.optimizer, config.training, config.model.seq_length)
    for name, then, now in learning_rates.differences(here):
        yield f"{SCHEDULE_FLAGS[name]} {then} there and {now} here"
    for name, then, now in weight_decays.differences(WeightDecaySchedule.from_config(config.optimizer)):
        yield f"{WEIGHT_DECAY_FLAGS[name]} {then} there and {now} here"


def load_progress(config: Config, engine: ZeroEngine, origin: Origin) -> Progress:
    """Where the run goes on: after the checkpoint, whose weights and optimizer state the engine takes over, or at the start."""
    if origin.reader is None:
        return Progress()
    manifest = origin.reader.manifest
    with_moments = not (config.checkpoint.no_load_optim or origin.weights_only or config.training.skip_train)
    load_engine(engine, origin.reader, with_moments=with_moments)
    if origin.weights_only:
        return Progress()
    engine.start_iteration(manifest.iteration)
    return Progress(manifest.iteration, manifest.consumed_samples, manifest.run["scheduled_samples"])


def with_remaining_batches(config: Config, progress: Progress, world_size: int) -> Config:
    """The configuration, with the iteration at which --train-samples end if the run goes on from `progress`.

    Batches may have had other sizes before. Raises FlagError where this world cannot have one of the batches from there on.
    """
    check_batches(config, world_size, progress.consumed_samples)
    train_samples = config.training.train_samples
    if train_samples is None:
        return config
    remaining = running_schedule(config, world_size).iterations_within(train_samples, progress.consumed_samples)
    return config.with_values(train_iters=progress.iteration + remaining)


def describe_start(config: Config, origin: Origin, progress: Progress) -> str:
    """What was loaded, and which flags of a run that goes on differ; an empty string without a checkpoint."""
    if origin.reader is None:
        load = config.checkpoint.load
        return "" if load is None else f"WARNING: --load {load} holds no checkpoint; starting from scratch"
    manifest = origin.reader.manifest
    what = "weights of the checkpoint" if origin.weights_only else "checkpoint"
    lines = [*origin.notices, f"  successfully loaded {what} from {origin.reader.folder} at iteration {manifest.iteration}"]
    if progress.iteration >= config.training.train_iters and not config.training.skip_train:
        lines.append(f"nothing left to train: --train-iters {config.training.train_iters} is reached")
    if not origin.weights_only:
        differing = [*flags_that_differ(config, manifest.flags), *schedule_differences(config, manifest.flags)]
        lines += [f"WARNING: the checkpoint's run had other flags: {'; '.join(differing)}"] if differing else []
        if config.checkpoint.use_checkpoint_opt_param_scheduler:
            lines.append("the schedule of learning rate and weight decay is the checkpoint's")
    return "\n".join(lines)


def flags_that_differ(config: Config, theirs: Mapping[str, Any]) -> list[str]:
    """The flags that decide data order or numbers, where this run's differ from a checkpoint's, each with both values."""
    differing = []
    for name in FLAGS_OF_A_CONTINUED_RUN:
        group = GROUP_OF_FIELD[name]
        then, now = theirs.get(group, {}).get(name), config.value_of(name)
        then = tuple(then) if isinstance(then, list) else then
        if name in theirs.get(group, {}) and then != now:
            differing.append(f"{spelling_of(name)} {then} there and {now} here")
    return differing


def _last_good(folder: Path, world: World) -> tuple[Path, tuple[str, ...]]:
    """The newest checkpoint up to this one whose every byte is as written, and what is wrong with newer ones; ranks share the reading."""
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


def _check_same(seen: str) -> None:
    """Nothing, where every rank sees the same. Raises StartupError naming two ranks that do not."""
    by_rank = gather_texts(seen)
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            raise StartupError(
                f"the ranks see different checkpoints: {by_rank[0].strip()} on rank 0 and {other.strip()} on rank {rank}; "
                "--load must be a folder of one file system that all ranks share"
            )


def _their_schedules(theirs: Mapping[str, Any]) -> tuple[LearningRateSchedule, WeightDecaySchedule]:
    """Of a checkpoint's flags; what its program did not know yet is at its default."""
    try:
        optimizer, training = _known(OptimizerConfig, theirs["optimizer"]), _known(TrainingConfig, theirs["training"])
        if optimizer.end_weight_decay is None:
            optimizer = replace(optimizer, start_weight_decay=optimizer.weight_decay, end_weight_decay=optimizer.weight_decay)
        learning_rates = LearningRateSchedule.from_config(optimizer, training, theirs["model"]["seq_length"])
        return learning_rates, WeightDecaySchedule.from_config(optimizer)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's flags lack the schedule ({error}); give --finetune to take its weights only") from None


def _known(group: type[Group], flags: Mapping[str, Any]) -> Group:
    """The flags of a group that are stored, without those that are no flags any more."""
    names = {member.name for member in fields(group)}
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items() if name in names}
    return group(**known)


def _with_their_schedule(config: Config, theirs: Mapping[str, Any]) -> Config:
    learning_rates, weight_decays = _their_schedules(theirs)
    fraction = theirs["optimizer"]["lr_warmup_fraction"]
    optimizer = replace(
        config.optimizer,
        lr=learning_rates.max_lr,
        min_lr=learning_rates.min_lr,
        lr_decay_style=learning_rates.style,
        lr_warmup_init=learning_rates.warmup_init_lr,
        lr_decay_iters=None,
        lr_decay_samples=int(learning_rates.decay_samples),
        lr_warmup_fraction=fraction,
        lr_warmup_iters=0,
        lr_warmup_samples=0 if fraction is not None else int(learning_rates.warmup_samples),
        lr_wsd_decay_style=learning_rates.annealing_style,
        lr_wsd_decay_iters=None,
        lr_wsd_decay_samples=int(learning_rates.annealing_samples) or None,
        weight_decay=theirs["optimizer"]["weight_decay"],
        weight_decay_incr_style=weight_decays.style,
        start_weight_decay=weight_decays.start,
        end_weight_decay=weight_decays.end,
        weight_decay_incr_samples=weight_decays.incr_samples,
    )
    return replace(config, optimizer=optimizer)
