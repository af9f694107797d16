"""Chooses the Hugging Face layout for one of our models, or for a given config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_zpp.checkpoint.hf import gpt2, llama
from megatron_zpp.checkpoint.hf.rules import Boundaries, Buffer, TensorRule
from megatron_zpp.config.flag import any_of
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.system.outside import Members
from megatron_zpp.system.user_error import UserError


@dataclass(frozen=True)
class Layout:
    """One layout of Hugging Face. `rules` and `config_json` accept only models without unsupported flags.

    prefix: begins every name; a model saved without its head lacks it. embedding: the name of the rows to which a head may be tied.
    buffers: that old versions of transformers saved.
    """

    model_type: str
    prefix: str
    embedding: str
    buffers: tuple[Buffer, ...]
    unsupported_flags: Callable[[ModelConfig], list[str]]
    rules: Callable[[ModelConfig, int, int], Iterator[TensorRule]]
    config_json: Callable[[ModelConfig, int, Boundaries], dict[str, Any]]
    model_config: Callable[[Members], ModelConfig]


def _of_family(family: llama.Family) -> Layout:
    shared = (llama.PREFIX, llama.EMBEDDING, llama.BUFFERS)
    return Layout(family.model_type, *shared, family.unsupported_flags, llama.rules, family.config_json, family.model_config)


LAYOUTS = (
    Layout(
        "gpt2",
        gpt2.PREFIX,
        gpt2.EMBEDDING,
        gpt2.BUFFERS,
        gpt2.unsupported_flags,
        gpt2.rules,
        gpt2.config_json,
        gpt2.model_config,
    ),
    *(_of_family(family) for family in (llama.LLAMA, llama.QWEN2, llama.QWEN3)),
)
READ_ONLY = (_of_family(llama.MISTRAL),)  # without a sliding window a Mistral is a Llama, and is written as one


def layout_holding(model: ModelConfig) -> Layout:
    """The layout that can express the model. Raises UserError if there is none, naming the unsupported flags of each layout."""
    unsupported = {layout.model_type: layout.unsupported_flags(model) for layout in LAYOUTS}
    for layout in LAYOUTS:
        if not unsupported[layout.model_type]:
            return layout
    reasons = "; ".join(f"{model_type} has no {', no '.join(flags)}" for model_type, flags in unsupported.items())
    raise UserError(f"this model cannot be converted, no known layout of Hugging Face can express it: {reasons}.")


def layout_of_type(config: Members) -> Layout:
    """The layout that config.json names. Raises UserError for an unknown kind of model."""
    by_type = {layout.model_type: layout for layout in (*LAYOUTS, *READ_ONLY)}
    model_type = config.text("model_type")
    if model_type not in by_type:
        config.refuse("model_type", any_of(list(by_type)))
    return by_type[model_type]
