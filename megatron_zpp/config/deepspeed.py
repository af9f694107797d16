"""Translates a DeepSpeed JSON into flags. A value in it counts as a given flag; messages name file, key and value.

The tables list every key by its dotted path: keys that set a field, keys that change nothing here, and keys that are refused.
Source: https://www.deepspeed.ai/docs/config-json and the configuration classes of DeepSpeed 0.17 and 0.19.8.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_zpp.config.deepspeed_offload import OFFLOAD, OLDER, offloads_optimizer
from megatron_zpp.config.flag import NOT_NEGATIVE, POSITIVE_COUNT, Bounds, FlagError, check_value, in_words, naming_sources, spelling_of
from megatron_zpp.config.options import Option, options
from megatron_zpp.config.ranks import RankCounts
from megatron_zpp.config.schema import Config
from megatron_zpp.system.outside import OutsideFile

KIND_IN_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number"}
LARGEST_SCALE_POWER = 126  # the largest power of two in fp32 is 2^127, and the loss is multiplied by the scale
OPTIONS: dict[str, Option] = {option.name: option for option in options()}

CONTEXT_FIELD = "context_parallel_size"
NOTHING: Mapping[str, Any] = {}
# The field of the schema that a key sets. The keys of the batch are listed separately, because their meaning depends on the world.
FIELDS: Mapping[str, str] = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.zero_quantized_weights": "zero_quantized_weights",
    "zero_optimization.zero_hpz_partition_size": "zero_hpz_partition_size",
    "zero_optimization.zero_quantized_gradients": "zero_quantized_gradients",
    "fp16.enabled": "fp16",
    "fp16.loss_scale": "loss_scale",
    "fp16.initial_scale_power": "initial_loss_scale",
    "fp16.loss_scale_window": "loss_scale_window",
    "fp16.hysteresis": "hysteresis",
    "fp16.min_loss_scale": "min_loss_scale",
    "bf16.enabled": "bf16",
    "activation_checkpointing.partition_activations": "partition_activations",
    "activation_checkpointing.cpu_checkpointing": "checkpoint_in_cpu",
    "activation_checkpointing.contiguous_memory_optimization": "contiguous_checkpointing",
    "checkpoint.use_node_local_storage": "node_local_checkpoints",
    "gradient_clipping": "clip_grad",
    "sequence_parallel_size": CONTEXT_FIELD,
    "steps_per_print": "log_interval",
}

FREE_FIELD = "log_interval"  # the flag wins: steps_per_print is the interval of lines by DeepSpeed itself, which are not printed here

MICRO_KEY, ACCUMULATION_KEY, GLOBAL_KEY = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
BATCH_KEYS = (GLOBAL_KEY, MICRO_KEY, ACCUMULATION_KEY)

# Names that DeepSpeed still reads, with today's name.
OLDER_SECTIONS: Mapping[str, str] = {"bfloat16": "bf16"}

# Keys that change neither numbers nor memory here, whatever their value.
WITHOUT_MEANING: frozenset[str] = frozenset(
    """
    zero_optimization.allgather_bucket_size zero_optimization.allgather_partitions zero_optimization.allgather_sequential
    zero_optimization.contiguous_gradients zero_optimization.cpu_offload_use_pin_memory zero_optimization.elastic_checkpoint
    zero_optimization.enable_sanity_checks zero_optimization.gather_16bit_weights_on_model_save
    zero_optimization.ignore_unused_parameters zero_optimization.load_from_fp32_weights zero_optimization.log_trace_cache_warnings
    zero_optimization.max_live_parameters zero_optimization.max_reuse_distance zero_optimization.memory_efficient_linear
    zero_optimization.model_persistence_threshold zero_optimization.module_granularity_threshold zero_optimization.overlap_comm
    zero_optimization.override_module_apply zero_optimization.param_persistence_threshold zero_optimization.parameter_alignment
    zero_optimization.pipeline_loading_checkpoint zero_optimization.prefetch_bucket_size zero_optimization.reduce_bucket_size
    zero_optimization.reduce_scatter zero_optimization.round_robin_gradients zero_optimization.stage3_allgather_sequential
    zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.stage3_gather_fp16_weights_on_model_save
    zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
    zero_optimization.stage3_model_persistence_threshold zero_optimization.stage3_module_granularity_threshold
    zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.sub_group_size
    zero_optimization.use_all_reduce_for_fetch_params zero_optimization.use_multi_rank_bucket_allreduce
    bf16.immediate_grad_update data_types.buffer_dtype data_types.keep_in_fp32_modules
    activation_checkpointing.number_checkpoints activation_checkpointing.profile
    activation_checkpointing.synchronize_checkpoint_boundary
    checkpoint.checkpoint_serialization checkpoint.tag_validation checkpoint.parallel_write checkpoint.writer
    aio dataloader_drop_last disable_python_gc dump_state log_level memory_breakdown
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """.split()
)

OFF: tuple[Any, ...] = (None, False)
ON: tuple[Any, ...] = (None, True)
SAME_MEAN = "the mean of gradients is the same wherever it is divided"
# Keys that change nothing here. For each: the values that ask for nothing else than is done, and what is done for other values too.
NOT_NEEDED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "prescale_gradients": (OFF, SAME_MEAN),
    "gradient_predivide_factor": (OFF, SAME_MEAN),
    "bf16.check_grad_overflow": (ON, "a step whose gradient is not finite is always skipped"),
    "zero_optimization.compute_grad_norm": (ON, "the norm is always computed, because a step without a finite one is skipped"),
    "comms_logger": (OFF, "--log-jsonl always has the bytes of each link"),
    "flops_profiler": (OFF, "training lines always have the FLOP/s"),
    "wall_clock_breakdown": (OFF, "use --timing-log-level"),
    "timers": (OFF, "training lines always have the times"),
}

NOTHING_TO_PUT = "leave the key out"
IN_WORKING_PRECISION = "gradients cross links in the working precision, with --zero-quantized-gradients in fewer bits; leave the key out"
PARAMETERS_OFFLOADED = "in stage 3 the weights at rest are the main weights, which offload_optimizer keeps on the host; use that key"

ABSENT_FEATURES = """
    autotuning compile compression_training curriculum_learning data_efficiency datastates_ckpt eigenvalue elasticity expert_parallel
    graph_harvesting hybrid_engine nebula pipeline progressive_layer_drop quantize_training sparse_attention
    use_data_before_expert_parallelism weight_quantization
""".split()

# Keys that would change memory, numbers or output and are not available. For each: the values that are accepted, because they ask for
# nothing, and the remedy for other values.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **{
        f"zero_optimization.{key}": (OFF, remedy)
        for key, remedy in {
            "offload_param": PARAMETERS_OFFLOADED,
            "cpu_offload_param": PARAMETERS_OFFLOADED,
            "zenflow": NOTHING_TO_PUT,
            "zero_quantized_nontrainable_weights": "every weight is trained; leave the key out",
            "zeropp_loco_param": "gradients carry no error feedback; leave the key out",
            "mics_hierarchical_params_gather": "use zero_hpz_partition_size",
            "legacy_stage1": NOTHING_TO_PUT,
            "leaf_module": NOTHING_TO_PUT,
            "save_muon_momentum_buffer_in_memory": NOTHING_TO_PUT,
        }.items()
    },
    "zero_optimization.mics_shard_size": ((*OFF, -1), "use zero_hpz_partition_size"),
    "fp16.auto_cast": (OFF, "the whole model is in fp16; leave the key out"),
    "fp16.consecutive_hysteresis": (OFF, "hysteresis starts anew when the scale grows; leave the key out"),
    "fp16.fp16_master_weights_and_grads": (OFF, "main weights and their gradients are fp32; leave the key out"),
    "bf16.bf16_master_weights_and_grads": (OFF, "main weights and their gradients are fp32; leave the key out"),
    "bf16.bf16_optimizer_states": (OFF, "optimizer state is fp32; leave the key out"),
    "data_types.param_dtype": ((None,), "use --fp16 or --bf16"),
    "data_types.grad_accum_dtype": ((None, "fp32"), "gradients are summed in fp32; leave the key out"),
    "checkpoint.load_universal": (OFF, "use --load, which takes a checkpoint of any number of ranks"),
    "amp": (OFF, "use --fp16 or --bf16"),
    "torch_autocast": (OFF, "use --fp16 or --bf16"),
    "optimizer": (OFF, "use --lr, --weight-decay, --adam-beta1, --adam-beta2 and --adam-eps"),
    "scheduler": (OFF, "use --lr-decay-style and --lr-warmup-iters"),
    "communication_data_type": (OFF, IN_WORKING_PRECISION),
    "seq_parallel_communication_data_type": (OFF, NOTHING_TO_PUT),
    "gradient_allreduce_op": ((None, "mean"), "gradients are averaged; leave the key out"),
    "managed_gradient_accumulation": (ON, "the training script counts the micro-batches of a step; leave the key out"),
    "fp32_allreduce": (OFF, IN_WORKING_PRECISION),
    "sparse_gradients": (OFF, NOTHING_TO_PUT),
    "disable_allgather": (OFF, NOTHING_TO_PUT),
    "tensor_parallel": (OFF, "use --tensor-model-parallel-size"),
    "vocabulary_size": (OFF, "use --vocab-size"),
    "tensorboard": (OFF, "use --tensorboard-dir"),
    "csv_monitor": (OFF, "use --log-jsonl"),
    "wandb": (OFF, "use --wandb-project"),
    "comet": (OFF, "use --tensorboard-dir or --log-jsonl"),
    **dict.fromkeys(ABSENT_FEATURES, (OFF, NOTHING_TO_PUT)),
}

KEYS: frozenset[str] = frozenset([*FIELDS, *BATCH_KEYS, OFFLOAD, OLDER, *WITHOUT_MEANING, *NOT_NEEDED, *REFUSED])
SECTIONS: frozenset[str] = frozenset(key.split(".")[0] for key in KEYS if "." in key)


def with_deepspeed_json(config: Config, ranks: RankCounts, instead: Mapping[str, Any] = NOTHING) -> Config:
    """The configuration with the values of the file of --deepspeed_config in a world of these ranks, as if the user had given these flags.

    instead: values of fields in place of those that the file has for them.
    Raises FlagError for a file that cannot be read, a key that is unknown or not available, and a value that contradicts a flag.
    """
    entries = _entries(config)
    if entries is None:
        return config
    settings = [*_translated(entries), *_offload(entries)]
    settings = [setting for setting in settings if setting.field != FREE_FIELD or FREE_FIELD not in config.given]
    settings = [replace(setting, value=instead.get(setting.field, setting.value)) for setting in settings]
    for setting in settings:
        check_agreement(config, setting)
    settings += _batch(entries, config, _dividing_samples(ranks, settings))
    values = {setting.field: setting.value for setting in settings if setting.value is not None}
    sources = {setting.field: setting.source for setting in settings if setting.field not in config.given}
    config = replace(config, given=config.given | frozenset(values), sources={**config.sources, **sources})
    return config.with_values(**values).with_notices(*_notices(entries, values))


def context_ranks(config: Config) -> int:
    """--context-parallel-size as the flag or the file of --deepspeed_config gives it. Raises FlagError as `with_deepspeed_json` does."""
    entries = _entries(config)
    for setting in _translated(entries) if entries is not None else []:
        if setting.field == CONTEXT_FIELD:
            check_agreement(config, setting)
            return int(setting.value)
    return config.distributed.context_parallel_size


def _entries(config: Config) -> Entries | None:
    """What the file of --deepspeed_config holds; None without the flag."""
    file = config.zero.deepspeed_config
    return None if file is None else Entries(file, dict(_flattened(file, read_object(file))))


@dataclass(frozen=True)
class Entries:
    """The values of a file by dotted key."""

    file: str
    values: Mapping[str, Any]

    def at(self, key: str) -> str:
        """`key value in file` for messages, the value as JSON."""
        return f"{key} {json.dumps(self.values[key])} in {self.file}"


@dataclass(frozen=True)
class Setting:
    """One field of the schema as a file sets it. A value of None means that the flag must not be given."""

    field: str
    value: Any
    source: str


def read_object(file: str) -> Mapping[str, Any]:
    """The object in a JSON file. Raises FlagError if the file is missing, is not JSON, is not an object, or has a key twice."""
    source = OutsideFile(Path(file), f"--deepspeed_config {file}", "give the path of a JSON object.", FlagError)
    source.check_is_there()
    return source.members(has_unique_keys=True).values


def check_agreement(config: Config, setting: Setting) -> None:
    """Raises FlagError if the flag is given with another value."""
    given = config.value_of(setting.field)
    if setting.field not in config.given or given == setting.value:
        return
    raise FlagError(f"{in_words(setting.field, given)} contradicts {setting.source}; give one of them, or the same value.")


def _flattened(file: str, found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for older, name in OLDER_SECTIONS.items():
        if older in found and name in found:
            raise FlagError(f"{older} and {name} in {file} are two names of one section; leave {older} out.")
    for written, value in found.items():
        key = OLDER_SECTIONS.get(written, written)
        if key not in SECTIONS:
            yield key, value
        elif isinstance(value, dict):
            for inner, inner_value in value.items():
                yield f"{key}.{inner}", inner_value
        elif value is not None:
            raise FlagError(f"{key} {json.dumps(value)} in {file} is not an object; write {key} with its keys in braces.")


def _unusable(entries: Entries) -> Iterator[str]:
    """One sentence for each key that is unknown, not available or "auto", so that a file can be corrected in one go."""
    for key, value in entries.values.items():
        if key not in KEYS:
            yield _about_unknown(entries.file, key)
        elif value == "auto" and key not in WITHOUT_MEANING and key not in NOT_NEEDED:
            yield f"{entries.at(key)} is filled in by another program; write the value, or leave the key out and give the flag."
        elif key in REFUSED and not asks_for_nothing(value, REFUSED[key][0]):
            yield f"{entries.at(key)} is not available; {REFUSED[key][1]}."


def _about_unknown(file: str, key: str) -> str:
    section, _, name = key.rpartition(".")
    siblings = [other for other in KEYS if other.rpartition(".")[0] == section] + ([] if section else list(SECTIONS))
    elsewhere = {other.rpartition(".")[2]: other for other in sorted(KEYS)}
    nearest = difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
    nearest = nearest or [elsewhere[match] for match in difflib.get_close_matches(name, elsewhere, n=1)]
    remedy = f"did you mean {nearest[0]}?" if nearest else "correct or remove it."
    return f"{key} in {file} is not a key of a DeepSpeed configuration; {remedy}"


def _translated(entries: Entries) -> list[Setting]:
    unusable = list(_unusable(entries))
    if unusable:
        raise FlagError("\n".join(unusable))
    found = (key for key, value in entries.values.items() if key in FIELDS and value is not None)
    return [Setting(FIELDS[key], _field_value(entries, key), entries.at(key)) for key in found]


def _offload(entries: Entries) -> list[Setting]:
    found = offloads_optimizer(entries.file, entries.values)
    return [] if found is None else [Setting("optimizer_cpu_offload", found[0], entries.at(found[1]))]


def _field_value(entries: Entries, key: str) -> Any:
    if key == "fp16.initial_scale_power":
        return 2.0 ** _value(entries, key, int, Bounds(at_least=0, at_most=LARGEST_SCALE_POWER))
    if key == "fp16.loss_scale":
        return _value(entries, key, float, NOT_NEGATIVE) or None  # 0 is dynamic
    option = OPTIONS[FIELDS[key]]
    return _value(entries, key, option.kind, option.flag.allowed)


def _value(entries: Entries, key: str, kind: type, allowed: Any) -> Any:
    value = entries.values[key]
    fits = isinstance(value, bool) if kind is bool else isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or (kind is int and value % 1 != 0):
        raise FlagError(f"{entries.at(key)} is not {KIND_IN_WORDS[kind]}; correct it.")
    try:
        number = kind(value)
    except OverflowError:
        raise FlagError(f"{entries.at(key)} is too large for a number; correct it.") from None
    check_value(f"{key} in {entries.file}:", number, allowed)
    return number


def _dividing_samples(ranks: RankCounts, settings: Sequence[Setting]) -> RankCounts:
    """The ranks with the groups that divide samples, if the file sets their size."""
    for setting in settings:
        if setting.field == CONTEXT_FIELD:
            try:
                return ranks.dividing_samples(setting.value)
            except FlagError as error:
                raise error.finished_by(partial(naming_sources, sources={CONTEXT_FIELD: setting.source})) from None
    return ranks


def _batch(entries: Entries, config: Config, ranks: RankCounts) -> list[Setting]:
    """Settings by train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x groups with samples of their own.

    A key that is missing is computed from the others, or is 1 if they do not determine it.
    """
    given = {key: _value(entries, key, int, POSITIVE_COUNT) for key in BATCH_KEYS if entries.values.get(key) is not None}
    if not given:
        return []
    sources = {key: entries.at(key) for key in given}
    for key, field in ((MICRO_KEY, "micro_batch_size"), (GLOBAL_KEY, "global_batch_size")):
        if field in config.given and key in given:
            check_agreement(config, Setting(field, given[key], sources[key]))
        elif field in config.given:
            given[key], sources[key] = config.value_of(field), f"{spelling_of(field)} {config.value_of(field)}"
    source = " with ".join(sources.values())
    micro, steps, total = (given.get(key) for key in (MICRO_KEY, ACCUMULATION_KEY, GLOBAL_KEY))
    if micro is None:
        micro = 1 if total is None else _share(total, steps or 1, ranks, source)
    found = micro * (steps or 1) * ranks.sample_groups
    if total is None:
        total = found
    if steps is not None and found != total:
        raise FlagError(
            f"{source}: micro-batch {micro} x {steps} accumulation steps x {ranks.groups_in_words} is {found} and not the batch of "
            f"{total}; correct one of them{_meant_for_all(total == micro * steps * ranks.world, ranks)}{_world_of_plan(config)}."
        )
    return [Setting("micro_batch_size", micro, source), Setting("global_batch_size", total, source)]


def _share(total: int, steps: int, ranks: RankCounts, source: str) -> int:
    if total % (steps * ranks.sample_groups):
        raise FlagError(
            f"{source}: a batch of {total} does not divide into {steps} accumulation steps on {ranks.groups_in_words}; "
            f"choose a multiple of {steps * ranks.sample_groups}."
        )
    return total // (steps * ranks.sample_groups)


def _meant_for_all(fits_world: bool, ranks: RankCounts) -> str:
    """What to add to an error about a batch that would fit if every rank had samples of its own; empty if it would not."""
    sizes = {"--tensor-model-parallel-size": ranks.tensor, spelling_of(CONTEXT_FIELD): ranks.context}
    flags = " and ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
    return f" (it would be right for {ranks.world} ranks, but those of {flags} have the same samples)" if flags and fits_world else ""


def _world_of_plan(config: Config) -> str:
    """What to add to an error about a batch in a plan whose world no flag says; else empty."""
    is_open = config.plan.dry_run and config.plan.nodes is None and config.plan.world_size is None
    is_open &= config.distributed.ranks_per_node is None
    return ", or give the world of the plan: --nodes and --ranks-per-node" if is_open else ""


def _notices(entries: Entries, values: Mapping[str, Any]) -> Iterator[str]:
    flags = [in_words(name, value) for name, value in values.items() if value is not False]
    yield f"{entries.file} sets {' '.join(flags) or 'no flag'}"
    for key, (neutral, reason) in NOT_NEEDED.items():
        if not asks_for_nothing(entries.values.get(key), neutral):
            yield f"{entries.file}: {key} has no effect here ({reason})"
    ignored = [key.rpartition(".")[2] for key in entries.values if key in WITHOUT_MEANING]
    if ignored:
        yield f"{entries.file}: not needed here and ignored, because they tune how DeepSpeed works inside: {', '.join(ignored)}"


def asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing: it is neutral, an empty object, or an object that switches itself off."""
    if isinstance(value, dict):
        return not value or value.get("enabled") is False or value.get("device") == "none"
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
