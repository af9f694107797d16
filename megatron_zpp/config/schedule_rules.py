"""Rules about lengths, batches, schedules and evaluation: each check raises FlagError for the flags that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_zpp.config.batch_schedule import batch_schedule, running_schedule
from megatron_zpp.config.data_sources import SPLITS, read_sources
from megatron_zpp.config.flag import FlagError, any_of
from megatron_zpp.config.horizons import horizons
from megatron_zpp.config.options import spelling_of
from megatron_zpp.config.schema import Config


def check_one_length(config: Config) -> None:
    training = config.training
    if training.train_iters is None:
        return
    for name in ("train_samples", "train_tokens"):
        value = config.value_of(name)
        if value is not None:
            raise FlagError(f"--train-iters {training.train_iters} and {spelling_of(name)} {value} exclude each other; give one of them.")


def check_schedule_counts_like_length(config: Config) -> None:
    """A run counted in samples or tokens has its schedule in these, every other run in iterations."""
    in_samples = _counts_in_samples(config)
    for in_iterations in ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"):
        in_samples_too = in_iterations.replace("iters", "samples")
        wrong, right = (in_iterations, in_samples_too) if in_samples else (in_samples_too, in_iterations)
        value = config.value_of(wrong)
        if value not in (None, 0):
            length = f"{_length_flag(config)} counts in samples" if in_samples else "the length of training counts in iterations"
            raise FlagError(f"{spelling_of(wrong)} {value} does not fit, because {length}; use {spelling_of(right)}.")
    for in_tokens in ("lr_decay_tokens", "lr_warmup_tokens"):
        value = config.value_of(in_tokens)
        if value and not in_samples:
            right = spelling_of(in_tokens.replace("tokens", "iters"))
            raise FlagError(
                f"{spelling_of(in_tokens)} {value} does not fit, because the length of training counts in iterations; use {right}."
            )


def check_one_warmup(config: Config) -> None:
    _check_one_of(config, "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens")


def check_one_decay(config: Config) -> None:
    _check_one_of(config, "lr_decay_samples", "lr_decay_tokens")


def _check_one_of(config: Config, *names: str) -> None:
    unsaid = {"lr_warmup_fraction": (None,)}  # a fraction of 0 was given, a length of 0 may be the default
    given = {name: config.value_of(name) for name in names if config.value_of(name) not in unsaid.get(name, (None, 0))}
    if len(given) > 1:
        words = " and ".join(f"{spelling_of(name)} {value}" for name, value in list(given.items())[:2])
        raise FlagError(f"{words} exclude each other; give one of them.")


def check_annealing(config: Config) -> None:
    """WSD needs the length of its last part, which no other style has."""
    optimizer = config.optimizer
    is_wsd = optimizer.lr_decay_style == "WSD"
    for name in ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"):
        if name in config.given and not is_wsd:
            raise FlagError(f"{spelling_of(name)} {config.value_of(name)} changes nothing without --lr-decay-style WSD; give that as well.")
    if is_wsd and optimizer.lr_wsd_decay_iters is None and optimizer.lr_wsd_decay_samples is None:
        needed = "--lr-wsd-decay-samples" if _counts_in_samples(config) else "--lr-wsd-decay-iters"
        raise FlagError(f"--lr-decay-style {optimizer.lr_decay_style} needs the length of its annealing; give {needed}.")


def check_weight_decays(config: Config) -> None:
    """The ends of a changing weight decay belong to a style that is not constant, and the other way round."""
    optimizer = config.optimizer
    for name in ("start_weight_decay", "end_weight_decay", "weight_decay_incr_samples"):
        value = config.value_of(name)
        if optimizer.weight_decay_incr_style == "constant" and value is not None:
            raise FlagError(
                f"{spelling_of(name)} {value} changes nothing without --weight-decay-incr-style linear or cosine; give that as well, "
                "or use --weight-decay."
            )
        if optimizer.weight_decay_incr_style != "constant" and value is None and name != "weight_decay_incr_samples":
            raise FlagError(f"--weight-decay-incr-style {optimizer.weight_decay_incr_style} needs both ends; give {spelling_of(name)}.")


def check_batch_flags(config: Config) -> None:
    """There is one way to say how large a batch is, and it can be read."""
    training = config.training
    if training.step_batch_size_schedule is not None:
        steps = f'--step-batch-size-schedule "{training.step_batch_size_schedule}"'
        if training.rampup_batch_size:
            raise FlagError(f"{steps} and --rampup-batch-size {' '.join(training.rampup_batch_size)} exclude each other; give one of them.")
        if training.global_batch_size is not None:
            raise FlagError(f"{steps} and --global-batch-size {training.global_batch_size} exclude each other; give one of them.")
    elif training.rampup_batch_size and training.global_batch_size is None:
        raise FlagError(f"--rampup-batch-size {' '.join(training.rampup_batch_size)} needs the size it ends at; give --global-batch-size.")


def check_iterations_to_skip(config: Config) -> None:
    words = config.training.iterations_to_skip
    for word in words:
        if not word.isdecimal() or int(word) == 0:
            raise FlagError(f"--iterations-to-skip {' '.join(words)} has {word}; give iterations from 1 on, such as 17 18.")


def check_evaluation(config: Config) -> None:
    """What evaluates has something to evaluate on."""
    training = config.training
    if training.skip_train and training.eval_iters == 0 and not training.full_validation:
        raise FlagError("--skip-train with --eval-iters 0 does nothing; give another --eval-iters, or --full-validation.")
    if training.full_validation and training.eval_iters == 0:
        raise FlagError("--full-validation and --eval-iters 0 exclude each other; leave one of them out.")


def check_garbage_collection(config: Config) -> None:
    for name in ("manual_gc_interval", "no_manual_gc_eval"):
        if config.value_of(name) and not config.training.manual_gc:
            raise FlagError(f"{spelling_of(name)} changes nothing without --manual-gc; give that as well.")


def check_validation_sets(config: Config) -> None:
    """Sets of their own, and whole sets, are made of corpora without weights."""
    data = config.data
    if data.validation_set_names and not data.multiple_validation_sets:
        raise FlagError("--validation-set-names changes nothing without --multiple-validation-sets; give that as well.")
    for flag in _validation_flags(config):
        if not data.names_corpora:
            raise FlagError(f"{flag} needs validation data; give --data-path, or --train-data-path and --valid-data-path.")
        sources = read_sources(data)
        blend = sources.common or sources.by_split.get(SPLITS[1])
        if blend is None:
            raise FlagError(f"{flag} needs validation data; give --valid-data-path.")
        if blend.weights is not None:
            raise FlagError(f"{flag} takes every validation corpus whole, so it has no weight; give prefixes alone for validation.")
        names = data.validation_set_names
        if names and (len(names) != len(blend.prefixes) or len(set(names)) < len(names)):
            raise FlagError(
                f"--validation-set-names {' '.join(names)} has {len(set(names))} different names for {len(blend.prefixes)} corpora; "
                "give each corpus a name of its own."
            )


def _validation_flags(config: Config) -> list[str]:
    """The given flags that look at validation corpora one by one."""
    flags = {"--multiple-validation-sets": config.data.multiple_validation_sets, "--full-validation": config.training.full_validation}
    return [flag for flag, is_given in flags.items() if is_given]


def check_learning_rates(config: Config) -> None:
    lr = config.optimizer.lr
    for name in ("min_lr", "lr_warmup_init"):
        value = config.value_of(name)
        if value > lr:
            raise FlagError(f"{spelling_of(name)} {value} is above --lr {lr}; choose at most {lr}.")


def check_warmup_ends_before_decay(config: Config) -> None:
    """In the unit of the flags where both are counted in it."""
    unit = "iters" if config.training.train_samples is None else "samples"
    warmup, decay = config.value_of(f"lr_warmup_{unit}"), config.value_of(f"lr_decay_{unit}")
    if warmup >= decay:
        raise FlagError(
            f"--lr-warmup-{unit} {warmup} does not end before the decay's horizon of {decay}; "
            f"choose {decay - 1} or less, or a higher --lr-decay-{unit}."
        )
    ends = horizons(config.optimizer, config.training, config.model.seq_length)
    if ends.warmup_samples + ends.annealing_samples > ends.decay_samples:
        annealing = config.value_of(f"lr_wsd_decay_{unit}")
        raise FlagError(
            f"--lr-wsd-decay-{unit} {annealing} begins before the warmup ends: of the horizon of {ends.decay_samples} samples, the warmup "
            f"takes {ends.warmup_samples:g} and the annealing {ends.annealing_samples}; choose a shorter one, or a higher "
            f"--lr-decay-{unit}."
        )


def check_batches_of_new_run(config: Config, world_size: int) -> None:
    """Every batch of a run that starts at 0; of one that may go on from a checkpoint, only the last size as yet."""
    if config.checkpoint.load is None or config.checkpoint.finetune:
        check_batches(config, world_size, 0)
    else:
        check_batches(config, world_size, batch_schedule(config.training, config.model.seq_length).stages[-1].start)


def check_batches(config: Config, world_size: int, consumed_samples: int) -> None:
    """Every batch from there on, where anything is trained, is a multiple of what the ranks take at once."""
    batches, training = running_schedule(config, world_size), config.training
    size = batches.misfit(consumed_samples)
    if size is None or training.skip_train:
        return
    below = size // batches.grain * batches.grain
    wish = f"--global-batch-size {size} is"
    if training.step_batch_size_schedule is not None:
        wish = f'--step-batch-size-schedule "{training.step_batch_size_schedule}" has batches of {size} samples,'
    elif training.rampup_batch_size and size != training.global_batch_size:
        wish = f"--rampup-batch-size {' '.join(training.rampup_batch_size)} has batches of {size} samples,"
    round_down = "give --decrease-batch-size-if-needed to round down, or " if below > 0 else ""
    raise FlagError(
        f"{wish} not a multiple of {batches.grain} (--micro-batch-size {training.micro_batch_size} x {world_size} ranks); "
        f"{round_down}choose {any_of([choice for choice in (below, below + batches.grain) if choice > 0])}."
    )


def check_evaluation_batch(config: Config, world_size: int) -> None:
    """Where it is not the batch of training, which has been checked."""
    training = config.training
    is_own = training.skip_train or not config.given.isdisjoint({"eval_micro_batch_size", "eval_global_batch_size"})
    grain = training.eval_micro_batch_size * world_size
    size = training.eval_global_batch_size
    if size % grain != 0 and is_own:
        below = size // grain * grain
        raise FlagError(
            f"--eval-global-batch-size {size} is not a multiple of {grain} (--eval-micro-batch-size {training.eval_micro_batch_size} x "
            f"{world_size} ranks); choose {any_of([choice for choice in (below, below + grain) if choice > 0])}."
        )


def schedule_flags_without_effect(config: Config) -> Iterator[str]:
    """One line for each of these flags that was given and changes nothing beside the others, or does what nobody may want."""
    if "weight_decay" in config.given and config.optimizer.weight_decay_incr_style != "constant":
        yield f"--weight-decay has no effect beside --weight-decay-incr-style {config.optimizer.weight_decay_incr_style}"
    if config.training.skip_train and config.checkpoint.load is None:
        yield "--skip-train without --load evaluates the initial weights"
    ends = horizons(config.optimizer, config.training, config.model.seq_length)
    if config.optimizer.lr_decay_style == "inverse-square-root" and ends.warmup_samples == 0:
        yield "--lr-decay-style inverse-square-root without a warmup falls as 1 / sqrt(samples) from the first sample on"


def _counts_in_samples(config: Config) -> bool:
    return config.training.train_samples is not None or config.training.train_tokens is not None


def _length_flag(config: Config) -> str:
    return "--train-samples" if config.training.train_samples is not None else "--train-tokens"


SCHEDULE_CHECKS_BEFORE_FILLING: tuple[Callable[[Config], None], ...] = (
    check_one_length,
    check_one_warmup,
    check_one_decay,
    check_schedule_counts_like_length,
    check_annealing,
    check_weight_decays,
    check_batch_flags,
    check_iterations_to_skip,
    check_evaluation,
    check_garbage_collection,
)
SCHEDULE_CHECKS_AFTER_FILLING: tuple[Callable[[Config], None], ...] = (
    check_learning_rates,
    check_warmup_ends_before_decay,
    check_validation_sets,
)
