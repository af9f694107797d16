"""From the flags as given to a configuration in which nothing is missing and nothing contradicts."""

from __future__ import annotations

from collections.abc import Callable

from megatron_zpp.config.architecture import (
    architecture_flags_without_effect,
    check_heads_divide_hidden_size,
    check_norms,
    check_one_activation,
    check_one_kind_of_positions,
    check_positions,
    check_query_groups,
    check_rope_scaling,
    check_rotary_channels,
    surprising_defaults,
)
from megatron_zpp.config.assumptions import assume
from megatron_zpp.config.data_sources import COMMON_FLAGS, SPLIT_FLAGS, DataSources, read_sources
from megatron_zpp.config.deepspeed_json import naming_sources, with_deepspeed_json
from megatron_zpp.config.derive import derive
from megatron_zpp.config.divisors import divisors
from megatron_zpp.config.flag import REQUIRED, FlagError, any_of, check_value
from megatron_zpp.config.options import options, spelling_of
from megatron_zpp.config.schedule_rules import (
    SCHEDULE_CHECKS_AFTER_FILLING,
    SCHEDULE_CHECKS_BEFORE_FILLING,
    check_batches_of_new_run,
    check_evaluation_batch,
    schedule_flags_without_effect,
)
from megatron_zpp.config.schema import PLAN_GROUP, TOKENIZER_FILES, TOKENIZER_TYPES, WORKING_DTYPE_BITS, Config


def resolve(config: Config, world_size: int, local_world_size: int | None) -> Config:
    """The configuration of this run in a world of `world_size` data-parallel ranks, filled in and checked.

    Called once, alike on every rank. local_world_size: ranks that the launcher started on this node, None where it does not say.
    Reads the file of --deepspeed_config first. Raises FlagError for the first rule that is broken.
    """
    config = with_deepspeed_json(config, world_size)
    try:
        return _resolve(config, world_size, local_world_size)
    except FlagError as error:
        raise FlagError(naming_sources(str(error), config.sources)) from None


def _resolve(config: Config, world_size: int, local_world_size: int | None) -> Config:
    for check in CHECKS_BEFORE_FILLING:
        check(config)
    wished = config.zero.zero_hpz_partition_size
    config = derive(assume(config), world_size, local_world_size)
    for check in CHECKS_AFTER_FILLING:
        check(config)
    check_ranks_per_node(config, world_size)
    check_batches_of_new_run(config, world_size)
    check_evaluation_batch(config, world_size)
    check_profiled_ranks(config, world_size)
    check_remaining_link_is_quantized(config, world_size)
    config = config.with_notices(*surprising_defaults(config))
    without_effect = (*flags_without_effect(config), *schedule_flags_without_effect(config))
    return config.with_notices(*without_effect, *links_that_are_missing(config, world_size, wished))


def check_required(config: Config) -> None:
    missing = [option.spelling for option in options() if option.flag.otherwise == REQUIRED and config.value_of(option.name) is None]
    if missing:
        example = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024"
        raise FlagError(f"{', '.join(missing)} must be given; a small GPT is {example}.")


def check_ranges(config: Config) -> None:
    for option in options():
        value = config.value_of(option.name)
        if value is not None:
            check_value(option.spelling, value, option.flag.allowed)


def check_parallelism(config: Config) -> None:
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        size = config.value_of(name)
        if size > 1:
            kind = name.split("_")[0]
            raise FlagError(f"{spelling_of(name)} {size} is not available, there is data parallelism but no {kind} parallelism; choose 1.")


def check_one_precision(config: Config) -> None:
    if config.precision.fp16 and config.precision.bf16:
        raise FlagError("--fp16 and --bf16 exclude each other; give one of them.")


def check_loss_scales(config: Config) -> None:
    initial, smallest = config.precision.initial_loss_scale, config.precision.min_loss_scale
    if initial < smallest:
        raise FlagError(f"--initial-loss-scale {initial} is below --min-loss-scale {smallest}; choose {smallest} or more.")


def check_vocabulary_padding(config: Config) -> None:
    rows, multiple = config.model.padded_vocab_size, config.model.make_vocab_size_divisible_by
    if rows is not None and rows % multiple != 0 and "make_vocab_size_divisible_by" in config.given:
        raise FlagError(
            f"--padded-vocab-size {rows} is not a multiple of --make-vocab-size-divisible-by {multiple}; leave one of them out."
        )


def check_recomputation(config: Config) -> None:
    model = config.model
    for name in ("recompute_method", "recompute_num_layers"):
        if config.value_of(name) is not None and model.recompute_granularity != "full":
            raise FlagError(f"{_as_given(config, name)} changes nothing without --recompute-granularity full; give that as well.")
    if model.recompute_num_layers is not None and model.recompute_num_layers > model.num_layers:
        raise FlagError(
            f"--recompute-num-layers {model.recompute_num_layers} is more than --num-layers {model.num_layers}; "
            f"choose {model.num_layers} or less."
        )


def check_sources(config: Config) -> None:
    sources = read_sources(config.data)
    if config.data.mock_data and config.data.names_corpora:
        raise FlagError(f"--mock-data and {' and '.join(flags_of_corpora(config))} exclude each other; give one of them.")
    if sources.by_split and "split" in config.given:
        raise FlagError(
            f"--split {config.data.split} and {' and '.join(flags_of_corpora(config))} exclude each other, "
            "for each split has corpora of its own; leave --split out."
        )
    if "mid_level_dataset_surplus" in config.given and not has_weights(sources):
        surplus = config.data.mid_level_dataset_surplus
        raise FlagError(f"--mid-level-dataset-surplus {surplus} changes nothing without a weighted blend; leave it out.")


def flags_of_corpora(config: Config) -> list[str]:
    """The flags that name what the run trains on, with their values."""
    names = (*COMMON_FLAGS, "per_split_data_args_path", *SPLIT_FLAGS.values())
    given = {name: config.value_of(name) for name in names if config.value_of(name)}
    return [f"{spelling_of(name)} {value if isinstance(value, str) else ' '.join(value)}" for name, value in given.items()]


def has_weights(sources: DataSources) -> bool:
    blends = [sources.common, *sources.by_split.values()]
    return any(blend is not None and blend.weights is not None for blend in blends)


def check_tokenizer(config: Config) -> None:
    """Whatever the kind needs is given, before a file is read."""
    data = config.data
    if data.tokenizer_type is None:
        given = " and ".join(f"{spelling_of(name)} {config.value_of(name)}" for name in TOKENIZER_FILES if config.value_of(name))
        raise FlagError(f"{given} needs its kind; give --tokenizer-type, one of {', '.join(TOKENIZER_TYPES)}.")
    for name in NEEDED_BY_TOKENIZER.get(data.tokenizer_type, ("tokenizer_model",)):
        if config.value_of(name) is None:
            raise FlagError(f"--tokenizer-type {data.tokenizer_type} needs {FLAGS_OF_TOKENIZERS[name]}; give {spelling_of(name)}.")


def check_quantization(config: Config) -> None:
    """ZeRO++ quantizes what crosses a link between shards, which stage 0 does not have."""
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if config.value_of(name) and config.zero.zero_stage == 0:
            raise FlagError(f"{spelling_of(name)} has nothing to quantize in --zero-stage 0; choose --zero-stage 1, 2 or 3.")
    for name, switch in QUANTIZATION_DETAILS.items():
        if name in config.given and not any(config.value_of(feature) for feature in switch):
            features = any_of([spelling_of(feature) for feature in switch])
            raise FlagError(f"{spelling_of(name)} {config.value_of(name)} changes nothing without {features}; give that as well.")
    check_gradients_are_quantized_somewhere(config)


def check_gradients_are_quantized_somewhere(config: Config) -> None:
    zero = config.zero
    if (
        zero.zero_quantized_gradients
        and zero.zero_quantized_gradients_intra_bits == zero.zero_quantized_gradients_inter_bits == WORKING_DTYPE_BITS
    ):
        raise FlagError(
            "--zero-quantized-gradients with 16 bits inside a partition and between partitions quantizes nothing; choose 4 or 8 for "
            "--zero-quantized-gradients-inter-bits, or leave --zero-quantized-gradients out."
        )


def check_secondary_partition(config: Config) -> None:
    partition_ranks = config.zero.zero_hpz_partition_size
    if partition_ranks > 1 and config.zero.zero_stage != 3:
        raise FlagError(
            f"--zero-hpz-partition-size {partition_ranks} keeps a copy of sharded weights, which --zero-stage {config.zero.zero_stage} "
            "does not have; choose --zero-stage 3, or 1 for no copy."
        )


def check_partition_divides_node(config: Config) -> None:
    partition_ranks, ranks_per_node = config.zero.zero_hpz_partition_size, config.distributed.ranks_per_node
    if ranks_per_node % partition_ranks != 0:
        raise FlagError(
            f"--zero-hpz-partition-size {partition_ranks} does not divide the {ranks_per_node} ranks of a node; "
            f"choose {any_of(divisors(ranks_per_node))}, or start a multiple of {partition_ranks} ranks per node."
        )


def check_leaving(config: Config) -> None:
    training = config.training
    if "exit_signal" in config.given and not training.exit_signal_handler:
        raise FlagError(f"--exit-signal {training.exit_signal} changes nothing without --exit-signal-handler; give that as well.")
    if training.exit_signal_handler and config.checkpoint.save is None:
        raise FlagError("--exit-signal-handler needs a folder to save in; give --save.")


def check_saving(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        for name in ("save_interval", "async_save", "keep_last", "save_retain_interval", "no_save_optim", "log_progress"):
            if config.value_of(name) not in (None, False):
                raise FlagError(f"{_as_given(config, name)} needs a folder to save in; give --save.")
    interval, retain_interval = checkpoint.save_interval, checkpoint.save_retain_interval
    if interval is not None and retain_interval is not None and retain_interval % interval != 0:
        raise FlagError(
            f"--save-retain-interval {retain_interval} is not a multiple of --save-interval {interval}, so some of what it is to keep "
            f"would never be saved; choose {interval * max(1, round(retain_interval / interval))}."
        )


def check_loading(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.override_opt_param_scheduler and checkpoint.use_checkpoint_opt_param_scheduler:
        raise FlagError("--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other; give one of them.")
    if checkpoint.load is not None:
        return
    for name in NEED_LOAD:
        if config.value_of(name) not in (None, False):
            raise FlagError(f"{_as_given(config, name)} needs a checkpoint to load; give --load.")
    if checkpoint.use_checkpoint_args and checkpoint.pretrained_checkpoint is None:
        raise FlagError("--use-checkpoint-args needs a checkpoint; give --load or --pretrained-checkpoint.")


def check_plan(config: Config) -> None:
    for option in options():
        if option.group == PLAN_GROUP and option.name in config.given and not config.plan.dry_run:
            raise FlagError(f"{_as_given(config, option.name)} changes nothing in a run, only in a plan; give --dry-run as well.")


def check_profiling(config: Config) -> None:
    profiling = config.profiling
    if not profiling.profile:
        return
    if profiling.profile_step_end <= profiling.profile_step_start:
        raise FlagError(
            f"--profile-step-end {profiling.profile_step_end} is not above --profile-step-start {profiling.profile_step_start}; "
            f"choose {profiling.profile_step_start + 1} or more."
        )
    if profiling.profile_dir is None and config.logging.tensorboard_dir is None:
        raise FlagError("--profile needs a folder for its traces; give --profile-dir, or --tensorboard-dir.")


def check_profiled_ranks(config: Config, world_size: int) -> None:
    for word in config.profiling.profile_ranks:
        if not (word.isdecimal() and int(word) < world_size):
            raise FlagError(f"--profile-ranks {word} is not a rank of this world; choose among 0 to {world_size - 1}.")


def _as_given(config: Config, name: str) -> str:
    value = config.value_of(name)
    return spelling_of(name) if value is True else f"{spelling_of(name)} {value}"


def check_ranks_per_node(config: Config, world_size: int) -> None:
    ranks_per_node = config.distributed.ranks_per_node
    if world_size % ranks_per_node != 0:
        source = "" if "ranks_per_node" in config.given else " (from the launcher)"
        raise FlagError(
            f"--ranks-per-node {ranks_per_node}{source} does not divide the {world_size} ranks of the world; "
            f"choose {any_of(divisors(world_size))}."
        )


def check_remaining_link_is_quantized(config: Config, world_size: int) -> None:
    """Where there is one partition, or partitions of one rank, gradients cross one link alone; it must not be the one of 16 bits."""
    if not has_inter_link(config, world_size):
        name, reason = "zero_quantized_gradients_intra_bits", "there is one node"
    elif partition_ranks(config) == 1:
        name, reason = "zero_quantized_gradients_inter_bits", "each node has one rank"
    else:
        return
    if config.zero.zero_quantized_gradients and config.value_of(name) == WORKING_DTYPE_BITS:
        raise FlagError(
            f"{spelling_of(name)} 16 leaves --zero-quantized-gradients nothing to quantize, because {reason}; "
            "choose 4 or 8, or leave --zero-quantized-gradients out."
        )


def partition_ranks(config: Config) -> int:
    """Ranks of a partition, within which the ladder's intra link is: what --zero-hpz-partition-size asks for, else a node's."""
    asked = config.zero.zero_hpz_partition_size
    return asked if asked > 1 else config.distributed.ranks_per_node


def has_inter_link(config: Config, world_size: int) -> bool:
    """Whether there are several partitions."""
    return world_size > partition_ranks(config)


def flags_without_effect(config: Config) -> list[str]:
    """One line for each flag that was given and changes nothing beside the others."""
    reasons = {}
    if not config.precision.fp16:
        reasons = dict.fromkeys(("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), "without --fp16")
    elif config.precision.loss_scale is not None:
        reasons = dict.fromkeys(("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), "beside --loss-scale")
    used = (
        *NEEDED_BY_TOKENIZER.get(config.data.tokenizer_type, ("tokenizer_model",)),
        *TAKEN_BY_TOKENIZER.get(config.data.tokenizer_type, ()),
    )
    reasons |= {
        name: f"with --tokenizer-type {config.data.tokenizer_type}" for name in FLAGS_OF_TOKENIZERS if name not in (*used, "vocab_size")
    }
    reasons |= architecture_flags_without_effect(config)
    reasons |= {
        name: f"without {any_of([spelling_of(other) for other in needed])}"
        for name, needed in NEEDED_BY_OUTLETS.items()
        if all(config.value_of(other) in (None, False, 0) for other in needed)
    }
    return [f"{spelling_of(name)} has no effect {reason}" for name, reason in reasons.items() if name in config.given]


def links_that_are_missing(config: Config, world_size: int, wished_partition_ranks: int) -> list[str]:
    """What ZeRO++ cannot do in this world, because there is no link between partitions, or none at all."""
    features = [spelling_of(name) for name in ("zero_quantized_weights", "zero_quantized_gradients") if config.value_of(name)]
    if wished_partition_ranks > config.zero.zero_hpz_partition_size:
        features.insert(0, f"{spelling_of('zero_hpz_partition_size')} {wished_partition_ranks}")
    if not features or has_inter_link(config, world_size):
        return []
    if world_size == 1:
        return [f"{' and '.join(features)}: there is one rank, so nothing crosses a link, is quantized or kept as a copy"]
    return [f"{' and '.join(features)}: there is one node, so only the link inside it carries quantized values"]


FLAGS_OF_TOKENIZERS = {
    "tokenizer_model": "its model file",
    "vocab_file": "its vocab.json",
    "merge_file": "its merges.txt",
    "vocab_size": "the size of its vocabulary",
    "vocab_extra_ids": "the number of its extra ids",
    "tiktoken_pattern": "the name of its pattern, v1 or v2",
    "tiktoken_num_special_tokens": "the number of its special tokens",
    "tokenizer_special_tokens": "the names of its special tokens",
}
# What a kind needs, where that is not --tokenizer-model alone, and what it takes besides.
NEEDED_BY_TOKENIZER = {
    "NullTokenizer": ("vocab_size",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "TikTokenizer": ("tokenizer_model", "tiktoken_pattern"),
}
TAKEN_BY_TOKENIZER = {
    "SentencePieceTokenizer": ("vocab_extra_ids",),
    "TikTokenizer": ("tiktoken_num_special_tokens", "tokenizer_special_tokens"),
}
_OF_POINTS = ("tensorboard_dir", "wandb_project")
# What a flag of logging or profiling needs beside it, any one of these, to have an effect.
NEEDED_BY_OUTLETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "tensorboard_log_interval",
            "log_memory_to_tensorboard",
            "log_world_size_to_tensorboard",
            "log_validation_ppl_to_tensorboard",
            "no_log_learnig_rate_to_tensorboard",
            "no_log_loss_scale_to_tensorboard",
            "log_timers_to_tensorboard",
        ),
        _OF_POINTS,
    ),
    "tensorboard_queue_size": ("tensorboard_dir",),
    "timing_log_option": ("timing_log_level",),
    **dict.fromkeys(("wandb_entity", "wandb_exp_name", "wandb_save_dir"), ("wandb_project",)),
    **dict.fromkeys(("profile_step_start", "profile_step_end", "profile_dir"), ("profile",)),
    "profile_ranks": ("profile", "record_memory_history"),
    "memory_snapshot_path": ("record_memory_history",),
}
QUANTIZATION_DETAILS = {
    "zero_quantized_weights_bits": ("zero_quantized_weights",),
    "zero_quantized_gradients_intra_bits": ("zero_quantized_gradients",),
    "zero_quantized_gradients_inter_bits": ("zero_quantized_gradients",),
    "zero_quantized_gradients_rotation": ("zero_quantized_gradients",),
    "zero_quantized_gradients_rounding": ("zero_quantized_gradients",),
    "zero_full_precision_iters": ("zero_quantized_weights", "zero_quantized_gradients"),
}
NEED_LOAD = (
    "no_load_optim",
    "finetune",
    "ckpt_step",
    "load_last_good_checkpoint",
    "exit_on_missing_checkpoint",
    "override_opt_param_scheduler",
    "use_checkpoint_opt_param_scheduler",
)
CHECKS_BEFORE_FILLING: tuple[Callable[[Config], None], ...] = (
    check_required,
    check_ranges,
    check_parallelism,
    check_one_precision,
    check_loss_scales,
    *SCHEDULE_CHECKS_BEFORE_FILLING,
    check_heads_divide_hidden_size,
    check_recomputation,
    check_one_activation,
    check_one_kind_of_positions,
    check_norms,
    check_vocabulary_padding,
    check_sources,
    check_quantization,
    check_secondary_partition,
    check_leaving,
    check_saving,
    check_loading,
    check_plan,
    check_profiling,
)
CHECKS_AFTER_FILLING: tuple[Callable[[Config], None], ...] = (
    check_tokenizer,
    check_positions,
    check_query_groups,
    check_rotary_channels,
    check_rope_scaling,
    *SCHEDULE_CHECKS_AFTER_FILLING,
    check_partition_divides_node,
)
