"""Chooses the Hugging Face layout for one of our models, or for a given config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.checkpoint.hf import gpt2, llama
from megatron_zpp.checkpoint.hf.rules import Boundaries, TensorRule
from megatron_zpp.config.schema import ModelConfig


@dataclass(frozen=True)
class Layout:
    """One layout of Hugging Face. `rules` and `config_json` accept only models without unsupported flags.

    prefix: begins every name; a model saved without its head lacks it. ignored: endings of names that are not weights.
    """

    model_type: str
    prefix: str
    ignored: tuple[str, ...]
    unsupported_flags: Callable[[ModelConfig], list[str]]
    rules: Callable[[ModelConfig, int, int], Iterator[TensorRule]]
    config_json: Callable[[ModelConfig, int, Boundaries], dict[str, Any]]
    model_config: Callable[[Mapping[str, Any]], ModelConfig]


def _of_family(family: llama.Family) -> Layout:
    shared = (llama.PREFIX, llama.IGNORED_BUFFERS)
    return Layout(family.model_type, *shared, family.unsupported_flags, llama.rules, family.config_json, family.model_config)


LAYOUTS = (
    Layout(
        "gpt2",
        gpt2.PREFIX,
        gpt2.IGNORED_BUFFERS,
        gpt2.unsupported_flags,
        gpt2.rules,
        gpt2.config_json,
        gpt2.model_config,
    ),
    *(_of_family(family) for family in (llama.LLAMA, llama.QWEN2, llama.QWEN3)),
)
READ_ONLY = (_of_family(llama.MISTRAL),)  # without a sliding window a Mistral is a Llama, and is written as one


def layout_holding(model: ModelConfig) -> Layout:
    """The layout that can express the model. Raises ValueError if there is none, naming the unsupported flags of each layout."""
    unsupported = {layout.model_type: layout.unsupported_flags(model) for layout in LAYOUTS}
    for layout in LAYOUTS:
        if not unsupported[layout.model_type]:
            return layout
    reasons = "; ".join(f"{model_type} has no {', no '.join(flags)}" for model_type, flags in unsupported.items())
    raise ValueError(f"this model cannot be converted, no known layout of Hugging Face can express it: {reasons}.")


def layout_of_type(config: Mapping[str, Any]) -> Layout:
    """The layout that config.json names. Raises ValueError for an unknown kind of model."""
    read = (*LAYOUTS, *READ_ONLY)
    for layout in read:
        if layout.model_type == config.get("model_type"):
            return layout
    known = ", ".join(layout.model_type for layout in read)
    raise ValueError(f"config.json describes a model of type {config.get('model_type')}; {known} can be converted.")
