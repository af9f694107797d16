"""The run that a checkpoint stores: the state that a new run takes from it, and whether it fits that run (no torch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from megatron_zpp.checkpoint.candidates import find_candidates
from megatron_zpp.checkpoint.contents import check_model, check_moments, rotation_differences
from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, CheckpointError, Manifest
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.batch_schedule import batch_schedule, length_in_samples, running_schedule
from megatron_zpp.config.counted import counted
from megatron_zpp.config.defaults import warmup_iterations
from megatron_zpp.config.flag import LARGEST_LENGTH
from megatron_zpp.config.sample_lengths import SampleLengths
from megatron_zpp.config.schema import CheckpointConfig, Config, OptimizerConfig, PrecisionConfig, TrainingConfig, ZeroConfig
from megatron_zpp.data.reading import Reading, readings_of, samples_by_length
from megatron_zpp.parallel.specs import UnitSpec
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.training.lr_schedule import LearningRateSchedule
from megatron_zpp.training.weight_decay import WeightDecaySchedule
from megatron_zpp.zero.policy import KEPT_WEIGHT


@dataclass(frozen=True)
class StoredRun:
    """The run that the checkpoint in `folder` stores. weights_only: whether only its weights are taken."""

    folder: Path
    manifest: Manifest
    weights_only: bool

    @staticmethod
    def of(checkpoint: CheckpointConfig, folder: Path, manifest: Manifest) -> StoredRun:
        """The run stored in `folder`; flags and manifest decide weights_only."""
        is_pretrained = checkpoint.load is None or folder.parent != Path(checkpoint.load)
        return StoredRun(folder, manifest, checkpoint.finetune or is_pretrained or manifest.is_release)

    @property
    def consumed_samples(self) -> int:
        """Samples that the resumed run has consumed when it begins."""
        return 0 if self.weights_only else self.manifest.consumed_samples

    @property
    def ordered_samples(self) -> int:
        """Samples of the training data that the stored run put in order. Before checkpoints said so, it was the length by the flags.

        Raises CheckpointError if the flags do not have a length.
        """
        return self.manifest.run.get("ordered_samples", 0) or _stored_length(self.manifest.flags)

    @cached_property
    def readings(self) -> tuple[Reading, ...]:
        """Which data the resumed run has read when it begins."""
        if self.weights_only:
            return ()
        if "readings" not in self.manifest.run:
            return (Reading(0, _stored_seq_length(self.manifest.flags), "", {}),)
        return readings_of(Members(self.manifest.run, OutsideFile(self.folder / MANIFEST_FILE, str(self.folder / MANIFEST_FILE))))

    @property
    def earlier_samples(self) -> tuple[tuple[int, int], ...]:
        """The samples that the resumed run has consumed when it begins: how many had how many tokens each, in order."""
        return samples_by_length(self.readings, self.consumed_samples)

    def progress(self, ordered_samples: int) -> Progress:
        """Where the resumed run begins. ordered_samples: of the training data that it puts in order."""
        if self.weights_only:
            return Progress(ordered_samples=ordered_samples)
        run, consumed = self.manifest.run, self.consumed_samples
        lengths = SampleLengths(1, self.earlier_samples)
        scheduled = run["scheduled_samples"]
        return Progress(
            iteration=self.manifest.iteration,
            consumed_samples=consumed,
            scheduled_samples=scheduled,
            ordered_samples=ordered_samples,
            consumed_tokens=run.get("consumed_tokens", lengths.tokens_in(consumed)),
            scheduled_tokens=run.get("scheduled_tokens", lengths.tokens_in(scheduled)),
            readings=self.readings,
        )

    def gives_moments(self, config: Config) -> bool:
        """Whether the optimizer state is taken."""
        return not (self.weights_only or config.checkpoint.no_load_optim or config.training.skip_train)

    def gives_copies(self, config: Config) -> bool:
        """Whether the copies of the weights are taken to which the stored run added differences.

        Another code or dtype of differences starts with copies of the main weights.
        """
        return self.gives_moments(config) and self._copy() == _copy_of(config.zero, config.precision)

    def _copy(self) -> tuple[Any, ...] | None:
        """The element type of the stored copies, and the bits of their differences; None if there are no copies."""
        element_type = self.manifest.states.get(KEPT_WEIGHT)
        bits = self.manifest.flags.get("zero", {}).get("zero_quantized_weight_differences_bits")
        return None if element_type is None else (element_type, bits)

    def check_contents(self, config: Config, units: Sequence[UnitSpec]) -> None:
        """Raises CheckpointError if the checkpoint lacks state that the run takes, or has it for another model. units: of the model.

        Rotary positions may differ if the optimizer starts anew.
        """
        gives_moments = self.gives_moments(config)
        check_model(self.folder, self.manifest, config.model, units, may_rotate_otherwise=not gives_moments)
        if gives_moments:
            check_moments(self.folder, self.manifest)

    def notices(self, config: Config) -> list[str]:
        """Warnings about differences that are allowed."""
        rotation = rotation_differences(self.manifest, config.model)
        lines = [f"WARNING: the weights were trained with other rotary positions: {'; '.join(rotation)}"] if rotation else []
        if about_islands := self._about_islands(config):
            lines.append(about_islands)
        keeps_copies = config.zero.zero_quantized_weight_differences and not config.diloco.has_islands
        if self.gives_moments(config) and keeps_copies and not self.gives_copies(config):
            lines.append(
                "the checkpoint has no copy of the weights for --zero-quantized-weight-differences with these bits in this precision; the "
                "copies begin as its main weights"
            )
        return lines

    def _about_islands(self, config: Config) -> str:
        """A line about islands of the checkpoint that do not go on as they are; empty if all do."""
        there, here = self.manifest.islands, config.diloco.diloco_islands if config.diloco.has_islands else 0
        if there == here or not self.gives_moments(config):
            return ""
        if there == 0:
            return "the checkpoint has no outer steps; every island begins with its weights and moments, and without outer momentum"
        whose = "the run goes" if here == 0 else "the one here goes" if here == 1 else f"each of the {here} here goes"
        return f"the checkpoint has {counted(there, 'island')}; {whose} on from the mean of their weights and moments"


def find_stored_run(checkpoint: CheckpointConfig) -> StoredRun | None:
    """The run of the checkpoint that the flags name; None if there is none yet.

    With --load-last-good-checkpoint, of the newest complete one. Raises CheckpointError if it cannot be read.
    """
    found = find_candidates(checkpoint).first_readable()
    return None if found is None else StoredRun.of(checkpoint, *found)


def _copy_of(zero: ZeroConfig, precision: PrecisionConfig) -> tuple[str, int] | None:
    if not zero.zero_quantized_weight_differences:
        return None
    element_type = "BF16" if precision.bf16 else "F16" if precision.fp16 else "F32"
    return element_type, zero.zero_quantized_weight_differences_bits


Group = TypeVar("Group", OptimizerConfig, TrainingConfig)

SCHEDULE_FLAGS = {
    "style": "--lr-decay-style",
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "warmup_init_lr": "--lr-warmup-init",
    "warmup_samples": "samples of warmup",
    "decay_samples": "samples to the end of the decay (by default that of training)",
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


def with_schedule(config: Config, stored: StoredRun | None, sample_groups: int) -> Config:
    """The configuration with the checkpoint's schedule if --use-checkpoint-opt-param-scheduler is given, otherwise with its own.

    Outer steps begin where the warmup of this schedule ends, unless a flag says where. sample_groups: of ranks with samples of their own.
    Raises CheckpointError if a resumed run has another schedule and no flag says which of the two to use.
    """
    if stored is None or stored.weights_only or config.training.skip_train:
        return config
    theirs = stored.manifest.flags
    if config.checkpoint.use_checkpoint_opt_param_scheduler:
        config = _with_stored_schedule(config, theirs)
    elif not config.checkpoint.override_opt_param_scheduler and (differing := list(schedule_differences(config, theirs))):
        raise CheckpointError(
            f"{stored.folder} was saved with another schedule: {'; '.join(differing)}{_about_batch(config, theirs)}; give the same flags, "
            "or --override-opt-param-scheduler to use the flags' schedule, or --use-checkpoint-opt-param-scheduler to use the checkpoint's"
        )
    return _with_outer_start(config, stored, sample_groups)


def _about_batch(config: Config, theirs: Mapping[str, Any]) -> str:
    """Why the batch is another one although no flag is; empty if it is not."""
    then, now = theirs.get("training", {}).get("global_batch_size"), config.training.global_batch_size
    if "global_batch_size" in config.given or then == now:
        return ""
    return f" (--global-batch-size is not given, so it follows the number of ranks: {then} there and {now} here)"


def schedule_differences(config: Config, theirs: Mapping[str, Any]) -> Iterator[str]:
    """Settings of learning rate and weight decay that differ from a checkpoint's flags, each with both values."""
    learning_rates, weight_decays = _stored_schedules(theirs, config.sample_lengths)
    here = LearningRateSchedule.from_config(config.optimizer, config.training, config.sample_lengths)
    for name, then, now in learning_rates.differences(here):
        yield f"{SCHEDULE_FLAGS[name]} {then} there and {now} here"
    decays_here = WeightDecaySchedule.from_config(config.optimizer, config.training, config.sample_lengths)
    for name, then, now in weight_decays.differences(decays_here):
        yield f"{WEIGHT_DECAY_FLAGS[name]} {then} there and {now} here"


def _stored_schedules(theirs: Mapping[str, Any], lengths: SampleLengths) -> tuple[LearningRateSchedule, WeightDecaySchedule]:
    """Schedules of a checkpoint's flags for a run with samples of these lengths. Flags that are newer than it have their defaults."""
    try:
        optimizer, training = _group_of(OptimizerConfig, theirs["optimizer"]), _group_of(TrainingConfig, theirs["training"])
        if optimizer.end_weight_decay is None:
            optimizer = replace(optimizer, start_weight_decay=optimizer.weight_decay, end_weight_decay=optimizer.weight_decay)
        if optimizer.lr_decay_tokens is None and optimizer.lr_decay_samples == training.train_samples is not None:
            optimizer = replace(optimizer, lr_decay_tokens=training.train_tokens)  # as in flags of earlier versions
        learning_rates = LearningRateSchedule.from_config(optimizer, training, lengths)
        return learning_rates, WeightDecaySchedule.from_config(optimizer, training, lengths)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's flags lack the schedule ({error}); give --finetune to take its weights only") from None


def _stored_length(theirs: Mapping[str, Any]) -> int:
    """Length of training by a checkpoint's flags, in samples."""
    try:
        training = _group_of(TrainingConfig, theirs["training"])
        return length_in_samples(training, batch_schedule(training, SampleLengths(_stored_seq_length(theirs))))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's flags lack the length ({error}); give --finetune to take its weights only") from None


def _incr_samples(weight_decays: WeightDecaySchedule, lengths: SampleLengths) -> int:
    tokens_per_sample, samples = weight_decays.tokens_per_sample, weight_decays.incr_samples
    return samples if tokens_per_sample is None else lengths.samples_for(tokens_per_sample * samples)


def _stored_seq_length(theirs: Mapping[str, Any]) -> int:
    length = theirs.get("model", {}).get("seq_length")
    if type(length) is not int or not 1 <= length <= LARGEST_LENGTH:
        raise CheckpointError(f"the checkpoint's flags have seq_length {length}; give --finetune to take its weights only")
    return length


def _group_of(group: type[Group], flags: Mapping[str, Any]) -> Group:
    """A group of flags from a checkpoint, without flags that no longer exist."""
    names = {member.name for member in fields(group)}
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items() if name in names}
    return group(**known)


def _with_stored_schedule(config: Config, theirs: Mapping[str, Any]) -> Config:
    learning_rates, weight_decays = _stored_schedules(theirs, config.sample_lengths)
    fraction, tokens_per_sample = theirs["optimizer"]["lr_warmup_fraction"], learning_rates.tokens_per_sample
    warmup = 0 if fraction is not None else int(learning_rates.warmup_samples)
    optimizer = replace(
        config.optimizer,
        lr=learning_rates.max_lr,
        min_lr=learning_rates.min_lr,
        lr_decay_style=learning_rates.style,
        lr_warmup_init=learning_rates.warmup_init_lr,
        lr_decay_iters=None,
        lr_decay_samples=int(learning_rates.decay_samples),
        lr_decay_tokens=tokens_per_sample and tokens_per_sample * int(learning_rates.decay_samples),
        lr_warmup_fraction=fraction,
        lr_warmup_iters=0,
        lr_warmup_samples=warmup,
        lr_warmup_tokens=(tokens_per_sample or 0) * warmup,
        lr_wsd_decay_style=learning_rates.annealing_style,
        lr_wsd_decay_iters=None,
        lr_wsd_decay_samples=int(learning_rates.annealing_samples) or None,
        weight_decay=theirs["optimizer"]["weight_decay"],
        weight_decay_incr_style=weight_decays.style,
        start_weight_decay=weight_decays.start,
        end_weight_decay=weight_decays.end,
        weight_decay_incr_samples=_incr_samples(weight_decays, config.sample_lengths),
    )
    return replace(config, optimizer=optimizer)


def _with_outer_start(config: Config, stored: StoredRun, sample_groups: int) -> Config:
    """The configuration in which outer steps begin where the warmup of a run that goes on from `stored` ends, unless a flag says where.

    By the flags alone it would end after other iterations if batches had another size before.
    """
    by_flags, iteration = config.diloco.diloco_start_iteration, stored.manifest.iteration
    if by_flags is None or "diloco_start_iteration" in config.given:
        return config
    left = warmup_iterations(config, running_schedule(config, sample_groups), stored.consumed_samples)
    return config.with_values(diloco_start_iteration=iteration + left if left else min(by_flags, iteration))
