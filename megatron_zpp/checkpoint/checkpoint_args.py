"""--use-checkpoint-args: takes flags of the model and its tokenizer from a checkpoint, unless they are given (no torch)."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megatron_zpp.checkpoint.candidates import find_candidates
from megatron_zpp.checkpoint.manifest import CheckpointError, Manifest
from megatron_zpp.checkpoint.older_flags import flags_of
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.groups.data import CHANGED_TOKENIZERS, TOKENIZER_FIELDS, TOKENIZER_FILES
from megatron_zpp.config.schema import GROUPS, Config, ModelConfig

# MACHINE_FIELDS say how the model is computed, which may differ per machine. OTHER_WORDS follow from fields that are taken.
MACHINE_FIELDS = {
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "partition_activations",
    "checkpoint_in_cpu",
    "contiguous_checkpointing",
    "norm_backend",
    "attention_backend",
    "loss_chunk_tokens",
}
OTHER_WORDS = {"group_query_attention", "no_position_embedding"}
MODEL_FIELDS = tuple(member.name for member in fields(ModelConfig) if member.name not in MACHINE_FIELDS | OTHER_WORDS)
DEFAULTS = {group: {member.name: member.default for member in fields(GROUPS[group])} for group in ("model", "data")}
STORED_TOKENIZER_FIELDS = tuple(name for name in TOKENIZER_FIELDS if name != "legacy_tokenizer")  # which earlier checkpoints do not have


def with_checkpoint_args(config: Config) -> Config:
    """The configuration with the checkpoint's values instead of defaults. A given flag overrides the checkpoint.

    Without a checkpoint the configuration stays as it is. Raises FlagError if the checkpoint cannot be read.
    """
    if not config.checkpoint.use_checkpoint_args:
        return config
    try:
        found = find_candidates(config.checkpoint).first_readable()
    except CheckpointError as error:
        raise FlagError(f"--use-checkpoint-args: {error}.") from error
    if found is None:
        return config.with_notices("--use-checkpoint-args: there is no checkpoint yet, the flags decide")
    folder, manifest = found
    values = {name: value for name, value in _values(config, manifest).items() if name not in config.given}
    sources = {**config.sources, **dict.fromkeys(values, f"from {folder}")}
    config = replace(config, given=config.given | values.keys(), sources=sources).with_values(**values)
    return config.with_notices(f"--use-checkpoint-args: from {folder}: {', '.join(sorted(values)) or 'nothing'}")


def _values(config: Config, manifest: Manifest) -> dict[str, Any]:
    values = _members(manifest, "model", MODEL_FIELDS)
    stored = _members(manifest, "data", STORED_TOKENIZER_FIELDS)
    kind = stored.get("tokenizer_type")
    # A converted model is recorded with NullTokenizer if nobody said which tokenizer it had.
    is_replaced = kind == "NullTokenizer" and not config.given.isdisjoint(TOKENIZER_FILES)
    if "tokenizer_type" in config.given or is_replaced:
        return values
    if kind in CHANGED_TOKENIZERS and flags_of(manifest, "data")["legacy_tokenizer"]:
        stored["legacy_tokenizer"] = True
    return values | stored


def _members(manifest: Manifest, group: str, names: tuple[str, ...]) -> dict[str, Any]:
    stored = manifest.flags.get(group, {})
    found = {name: tuple(stored[name]) if isinstance(stored[name], list) else stored[name] for name in names if name in stored}
    # Defaults are left out: flags of an architecture that the checkpoint does not have would cause "without effect" warnings.
    return {name: value for name, value in found.items() if value not in (None, DEFAULTS[group][name])}
