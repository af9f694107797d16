"""Rules about lengths, batches, schedules and evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zpp.config.batch_schedule import BatchSchedule, Ramp, horizons, length_in_samples, read_ramp, read_steps
from megatron_zpp.config.counted import counted
from megatron_zpp.config.data_sources import read_sources
from megatron_zpp.config.flag import LARGEST_COUNT, FlagError, any_of, divisors, nearest, spelling_of, whole_number
from megatron_zpp.config.options import check_one_of
from megatron_zpp.config.ranks import groups_of
from megatron_zpp.config.schema import Config


def check_given(config: Config) -> None:
    """Raises FlagError for the first rule that the flags break as they were given."""
    check_one_of(config, "train_iters", "train_samples")
    check_one_of(config, "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens")
    check_one_of(config, "lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
    check_schedule_counts_like_length(config)
    check_annealing(config)
    check_weight_decays(config)
    check_batch_flags(config)
    check_iterations_to_skip(config)
    check_evaluation(config)


def check_resolved(config: Config, batches: BatchSchedule, sample_groups: int) -> None:
    """Raises FlagError for the first rule that the filled-in values break. batches: of the run of `sample_groups` groups."""
    check_total_samples(config, batches)
    check_learning_rates(config)
    check_warmup_ends_before_decay(config)
    check_validation_sets(config)
    check_batches_of_new_run(config, batches)
    check_evaluation_batch(config, sample_groups)


def check_total_samples(config: Config, batches: BatchSchedule) -> None:
    """Samples of the whole run can be counted: flags that are in range alone may have a product that is not."""
    training = config.training
    trained = length_in_samples(training, batches)
    if trained > LARGEST_COUNT:
        raise FlagError(
            f"--train-iters {training.train_iters} of --global-batch-size {training.global_batch_size} are {trained} samples, more than "
            f"{LARGEST_COUNT}; choose fewer or smaller iterations."
        )
    validations = training.train_iters // training.eval_interval + 1
    evaluated = validations * training.eval_iters * training.eval_global_batch_size
    if evaluated > LARGEST_COUNT:
        raise FlagError(
            f"{validations} validations of --eval-iters {training.eval_iters} times {training.eval_global_batch_size} samples are "
            f"{evaluated} samples, more than {LARGEST_COUNT}; lower --eval-iters, or raise --eval-interval {training.eval_interval}."
        )


def check_schedule_counts_like_length(config: Config) -> None:
    """Lengths of the schedule are in samples if the length of the run is, and in iterations if that is. Those in tokens fit both."""
    in_samples = _counts_in_samples(config)
    for in_iterations in ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"):
        in_samples_too = in_iterations.replace("iters", "samples")
        wrong, right = (in_iterations, in_samples_too) if in_samples else (in_samples_too, in_iterations)
        value = config.value_of(wrong)
        if value not in (None, 0):
            given = "--train-samples" if config.training.train_samples is not None else "--train-tokens"
            length = f"{given} counts in samples" if in_samples else "the length of training counts in iterations"
            raise FlagError(f"{spelling_of(wrong)} {value} does not fit, because {length}; use {spelling_of(right)}.")


def check_annealing(config: Config) -> None:
    """WSD needs the length of its annealing, the last part of the decay."""
    optimizer = config.optimizer
    if optimizer.lr_decay_style == "WSD" and optimizer.lr_wsd_decay_iters is None and optimizer.lr_wsd_decay_samples is None:
        needed = "--lr-wsd-decay-samples" if _counts_in_samples(config) else "--lr-wsd-decay-iters"
        raise FlagError(f"--lr-decay-style {optimizer.lr_decay_style} needs the length of its annealing; give {needed}.")


def check_weight_decays(config: Config) -> None:
    """A weight decay that changes needs a start and an end."""
    style = config.optimizer.weight_decay_incr_style
    for name in ("start_weight_decay", "end_weight_decay"):
        if style != "constant" and config.value_of(name) is None:
            raise FlagError(f"--weight-decay-incr-style {style} needs both ends; give {spelling_of(name)}.")


def check_batch_flags(config: Config) -> None:
    """The size of batches is one number, a ramp up to it, or a list of steps, but not two of these."""
    training = config.training
    if training.step_batch_size_schedule is not None:
        steps = f'--step-batch-size-schedule "{training.step_batch_size_schedule}"'
        if training.rampup_batch_size:
            raise FlagError(f"{steps} and --rampup-batch-size {' '.join(training.rampup_batch_size)} exclude each other; give one of them.")
        last_size = list(read_steps(training.step_batch_size_schedule, config.sample_lengths))[-1].asked_size
        if training.global_batch_size not in (None, last_size):
            raise FlagError(f"{steps} ends with another size than --global-batch-size {training.global_batch_size}; leave that out.")
    elif training.rampup_batch_size and training.global_batch_size is None:
        raise FlagError(f"--rampup-batch-size {' '.join(training.rampup_batch_size)} needs the size it ends at; give --global-batch-size.")


def check_iterations_to_skip(config: Config) -> None:
    words = config.training.iterations_to_skip
    for word in words:
        if not whole_number(word):
            raise FlagError(f"--iterations-to-skip {' '.join(words)} has {word}; give iterations from 1 on, such as 17 18.")


def check_evaluation(config: Config) -> None:
    """--skip-train and --full-validation contradict --eval-iters 0."""
    training = config.training
    if training.skip_train and training.eval_iters == 0 and not training.full_validation:
        raise FlagError("--skip-train with --eval-iters 0 does nothing; give another --eval-iters, or --full-validation.")
    if training.full_validation and training.eval_iters == 0:
        raise FlagError("--full-validation and --eval-iters 0 exclude each other; leave one of them out.")


def check_validation_sets(config: Config) -> None:
    """--multiple-validation-sets and --full-validation need validation corpora without weights, and names need to be different."""
    data = config.data
    for flag in _validation_flags(config):
        if not data.names_corpora:
            raise FlagError(f"{flag} needs validation data; give --data-path, or --train-data-path and --valid-data-path.")
        sources = read_sources(data)
        blend = sources.common or sources.by_split.get("valid")
        if blend is None:
            raise FlagError(f"{flag} needs validation data; give --valid-data-path.")
        if blend.weights is not None:
            raise FlagError(
                f"{flag} takes every validation corpus whole, so weights have no meaning; give validation prefixes without weights."
            )
        names = data.validation_set_names
        if names and (len(names) != len(blend.prefixes) or len(set(names)) < len(names)):
            raise FlagError(
                f"--validation-set-names {' '.join(names)} has {len(set(names))} different names for "
                f"{counted(len(blend.prefixes), 'corpus', 'corpora')}; give each corpus a name of its own."
            )


def _validation_flags(config: Config) -> list[str]:
    """The given flags that treat each validation corpus as a set of its own."""
    flags = {"--multiple-validation-sets": config.data.multiple_validation_sets, "--full-validation": config.training.full_validation}
    return [flag for flag, is_given in flags.items() if is_given]


def check_learning_rates(config: Config) -> None:
    lr = config.optimizer.lr
    for name in ("min_lr", "lr_warmup_init"):
        value = config.value_of(name)
        if value > lr:
            raise FlagError(f"{spelling_of(name)} {value} is above --lr {lr}; choose at most {lr}.")


def check_warmup_ends_before_decay(config: Config) -> None:
    """The first error counts in the unit of the flags, the others in samples."""
    optimizer = config.optimizer
    ends = horizons(optimizer, config.training, config.sample_lengths)
    unit = "iters" if config.training.train_samples is None else "samples"
    is_mixed = unit == "iters" and (optimizer.lr_decay_tokens is not None or optimizer.lr_warmup_tokens > 0)
    warmup, decay = config.value_of(f"lr_warmup_{unit}"), config.value_of(f"lr_decay_{unit}")
    if is_mixed and ends.warmup_samples >= ends.decay_samples:
        raise FlagError(
            f"the warmup of {ends.warmup_samples:g} samples does not end before the decay's horizon of {ends.decay_samples} samples; "
            "choose a lower --lr-warmup-tokens, or a higher --lr-decay-tokens."
        )
    if not is_mixed and warmup >= decay:
        raise FlagError(
            f"--lr-warmup-{unit} {warmup} must be below --lr-decay-{unit}, {decay} (by default --train-{unit}); "
            f"choose {decay - 1} or less, or a higher --lr-decay-{unit}."
        )
    if ends.warmup_samples + ends.annealing_samples > ends.decay_samples:
        annealing = config.value_of(f"lr_wsd_decay_{unit}")
        raise FlagError(
            f"--lr-wsd-decay-{unit} {annealing} begins before the warmup ends: of the horizon of {ends.decay_samples} samples, the warmup "
            f"takes {ends.warmup_samples:g} and the annealing {ends.annealing_samples}; choose a shorter one, or a higher "
            f"--lr-decay-{unit}."
        )


def check_batches_of_new_run(config: Config, batches: BatchSchedule) -> None:
    """Checks all batches of a run that starts at sample 0. If it may resume from a checkpoint, checks only the last size for now."""
    starts_anew = config.checkpoint.load is None or config.checkpoint.finetune
    check_batches(config, batches, 0 if starts_anew else batches.stages[-1].start)


def check_batches(config: Config, batches: BatchSchedule, consumed_samples: int) -> None:
    """Raises FlagError if a batch after `consumed_samples` is not a multiple of one micro-batch of all ranks."""
    training = config.training
    size = batches.misfit(consumed_samples)
    if size is None or training.skip_train:
        return
    below = size // batches.grain * batches.grain
    wish = f"--global-batch-size {size} is"
    if training.step_batch_size_schedule is not None:
        wish = f'--step-batch-size-schedule "{training.step_batch_size_schedule}" has batches of {counted(size, "sample")},'
    elif training.rampup_batch_size and size != training.global_batch_size:
        wish = f"--rampup-batch-size {' '.join(training.rampup_batch_size)} has batches of {counted(size, 'sample')},"
    groups = batches.grain // training.micro_batch_size
    smaller = [micro for micro in divisors(size // groups) if micro < training.micro_batch_size] if size % groups == 0 else []
    round_down = "give --decrease-batch-size-if-needed to round down, or " if below > 0 else ""
    choice = f"choose {any_of([choice for choice in (below, below + batches.grain) if choice > 0])}"
    if training.rampup_batch_size:
        choice = _fitting_ramp(read_ramp(training.rampup_batch_size), training.global_batch_size, batches.grain)
    elif smaller and training.step_batch_size_schedule is None:
        choice += f", or --micro-batch-size {any_of(nearest(smaller, training.micro_batch_size))}"
    grain = f"{batches.grain} (--micro-batch-size {training.micro_batch_size} x {groups_of(config.distributed, groups)})"
    raise FlagError(f"{wish} not a multiple of {grain}; {round_down}{choice}.")


def _fitting_ramp(ramp: Ramp, full_size: int, grain: int) -> str:
    """A remedy with a ramp near the given one, all of whose sizes are multiples of the grain."""
    full = max(full_size // grain, 1)
    if full == 1:
        batch = "" if full_size == grain else f" and give --global-batch-size {grain}"
        return f"leave --rampup-batch-size out{batch}, because no batch can be smaller"
    start = min(max(ramp.start_size // grain, 1), full)
    increments = divisors(full - start) if full > start else [1]
    increment = next((size for size in increments if size * grain >= ramp.increment), increments[-1])
    example = f"--rampup-batch-size {start * grain} {increment * grain} {ramp.samples}"
    if full * grain == full_size:
        return f"START and INCREMENT must be multiples of {grain}, for example {example}"
    return f"START, INCREMENT and the global batch must be multiples of {grain}, for example {example} --global-batch-size {full * grain}"


def check_evaluation_batch(config: Config, sample_groups: int) -> None:
    """Raises FlagError if the batch of evaluations is not a multiple of one micro-batch of all ranks.

    Without --skip-train, only sizes that were given for evaluations are checked.
    """
    training = config.training
    is_own = training.skip_train or not config.given.isdisjoint({"eval_micro_batch_size", "eval_global_batch_size"})
    grain = training.eval_micro_batch_size * sample_groups
    size = training.eval_global_batch_size
    if size % grain != 0 and is_own:
        below = size // grain * grain
        raise FlagError(
            f"--eval-global-batch-size {size} is not a multiple of {grain} (--eval-micro-batch-size {training.eval_micro_batch_size} x "
            f"{groups_of(config.distributed, sample_groups)}); "
            f"choose {any_of([choice for choice in (below, below + grain) if choice > 0])}."
        )


def surprising_schedules(config: Config) -> Iterator[str]:
    """One line for each combination of flags that is allowed and does what few users want."""
    if config.training.skip_train and config.checkpoint.load is None:
        yield "--skip-train without --load evaluates the initial weights"
    ends = horizons(config.optimizer, config.training, config.sample_lengths)
    if config.optimizer.lr_decay_style == "inverse-square-root" and ends.warmup_samples == 0:
        yield "--lr-decay-style inverse-square-root without a warmup falls as 1 / sqrt(samples) from the first sample on"


def _counts_in_samples(config: Config) -> bool:
    return config.training.train_iters is None and (config.training.train_samples is not None or config.training.train_tokens is not None)
