"""Rules about precision, data and tokenizer, checkpoints, leaving early and profiling."""

from __future__ import annotations

from megatron_zpp.config.data_sources import DataSources, parse_split, read_sources
from megatron_zpp.config.flag import FlagError, in_words, spelling_of, whole_number
from megatron_zpp.config.groups.data import CORPUS_FIELDS, TOKENIZER_FILES, TOKENIZER_TYPES
from megatron_zpp.config.options import check_one_of
from megatron_zpp.config.schema import Config

# What a kind of tokenizer needs, and what it is called in messages.
NEEDED_BY_TOKENIZER = {
    "NullTokenizer": {"vocab_size": "the size of its vocabulary"},
    "GPT2BPETokenizer": {"vocab_file": "its vocab.json", "merge_file": "its merges.txt"},
    "TikTokenizer": {"tokenizer_model": "its model file", "tiktoken_pattern": "the name of its pattern, v1 or v2"},
}
NEEDED_BY_OTHERS = {"tokenizer_model": "its model file"}


def check_given(config: Config) -> None:
    """Raises FlagError for the first rule that the flags break as they were given."""
    check_one_of(config, "fp16", "bf16")
    check_loss_scales(config)
    check_sources(config)
    check_retained_checkpoints(config)
    check_one_of(config, "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
    check_profiled_steps(config)


def check_resolved(config: Config, world_size: int) -> None:
    """Raises FlagError for the first rule that the filled-in values break in a world of `world_size` ranks."""
    check_tokenizer(config)
    check_profiled_ranks(config, world_size)
    check_copies(config, world_size)


def check_loss_scales(config: Config) -> None:
    initial, smallest = config.precision.initial_loss_scale, config.precision.min_loss_scale
    if initial < smallest:
        raise FlagError(f"--initial-loss-scale {initial} is below --min-loss-scale {smallest}; choose {smallest} or more.")


def check_sources(config: Config) -> None:
    sources = read_sources(config.data)
    parse_split(config.data.split)
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
    """The flags that name the corpora of the run, with their values."""
    return [in_words(name, config.value_of(name)) for name in CORPUS_FIELDS if config.value_of(name)]


def has_weights(sources: DataSources) -> bool:
    return any(blend.weights is not None for blend in sources.blends.values())


def check_tokenizer(config: Config) -> None:
    """Raises FlagError if a flag that the kind of tokenizer needs is missing, before any file is read."""
    data = config.data
    if data.tokenizer_type is None:
        given = " and ".join(in_words(name, config.value_of(name)) for name in TOKENIZER_FILES if config.value_of(name))
        raise FlagError(f"{given} needs its kind; give --tokenizer-type, one of {', '.join(TOKENIZER_TYPES)}.")
    for name, meaning in NEEDED_BY_TOKENIZER.get(data.tokenizer_type, NEEDED_BY_OTHERS).items():
        if config.value_of(name) is None:
            raise FlagError(f"--tokenizer-type {data.tokenizer_type} needs {meaning}; give {spelling_of(name)}.")


def check_copies(config: Config, world_size: int) -> None:
    copies, nodes = config.checkpoint.save_copies, world_size // config.distributed.ranks_per_node
    if config.checkpoint.save is not None and copies > nodes:
        remedy = "leave --save-copies out" if nodes == 1 else f"choose {nodes} or fewer"
        raise FlagError(f"--save-copies {copies} needs {copies} nodes with a disk each, and this run has {nodes}; {remedy}.")


def check_retained_checkpoints(config: Config) -> None:
    interval, retain_interval = config.checkpoint.save_interval, config.checkpoint.save_retain_interval
    if interval is not None and retain_interval is not None and retain_interval % interval != 0:
        raise FlagError(
            f"--save-retain-interval {retain_interval} is not a multiple of --save-interval {interval}, so some of what it is to keep "
            f"would never be saved; choose {interval * max(1, round(retain_interval / interval))}."
        )


def check_profiled_steps(config: Config) -> None:
    profiling = config.profiling
    if profiling.profile and profiling.profile_step_end <= profiling.profile_step_start:
        raise FlagError(
            f"--profile-step-end {profiling.profile_step_end} is not above --profile-step-start {profiling.profile_step_start}; "
            f"choose {profiling.profile_step_start + 1} or more."
        )


def check_profiled_ranks(config: Config, world_size: int) -> None:
    for word in config.profiling.profile_ranks:
        rank = whole_number(word)
        if rank is None or rank >= world_size:
            raise FlagError(f"--profile-ranks {word} is not a rank of this world; choose among 0 to {world_size - 1}.")
