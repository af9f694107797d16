"""Which layout of Hugging Face holds a model of ours, and which model of ours one of theirs is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_zpp.checkpoint.hf import gpt2, llama
from megatron_zpp.checkpoint.hf.rules import Boundaries, TensorRule
from megatron_zpp.config.schema import ModelConfig


@dataclass(frozen=True)
class Layout:
    """One layout; all but `misfits` and `model_config` are for models without misfits.

    prefix: of the names in a whole model, which one saved without its head lacks. ignored: ends of names that are no weights.
    misfits: flags of what the layout has no place for.
    """

    model_type: str
    prefix: str
    ignored: tuple[str, ...]
    misfits: Callable[[ModelConfig], list[str]]
    rules: Callable[[ModelConfig, int, int], Iterator[TensorRule]]
    config_json: Callable[[ModelConfig, int, Boundaries], dict[str, Any]]
    model_config: Callable[[Mapping[str, Any]], ModelConfig]


def _of_family(family: llama.Family) -> Layout:
    shared = (llama.PREFIX, llama.IGNORED_BUFFERS)
    return Layout(family.model_type, *shared, family.misfits, llama.rules, family.config_json, family.model_config)


LAYOUTS = (
    Layout(
        "gpt2",
        gpt2.PREFIX,
        gpt2.IGNORED_BUFFERS,
        gpt2.misfits,
        gpt2.rules,
        gpt2.config_json,
        gpt2.model_config,
    ),
    *(_of_family(family) for family in (llama.LLAMA, llama.QWEN2, llama.QWEN3)),
)


def layout_holding(model: ModelConfig) -> Layout:
    """The layout that has a place for everything in the model. Raises ValueError where none has, with what each lacks."""
    misfits = {layout.model_type: layout.misfits(model) for layout in LAYOUTS}
    for layout in LAYOUTS:
        if not misfits[layout.model_type]:
            return layout
    reasons = "; ".join(f"{model_type} has no {', no '.join(flags)}" for model_type, flags in misfits.items())
    raise ValueError(f"this model cannot be converted, no layout of Hugging Face that is known here holds it: {reasons}.")


def layout_of_type(config: Mapping[str, Any]) -> Layout:
    """The layout of their config.json. Raises ValueError for a kind of model that is not known here."""
    for layout in LAYOUTS:
        if layout.model_type == config.get("model_type"):
            return layout
    known = ", ".join(layout.model_type for layout in LAYOUTS)
    raise ValueError(f"config.json describes a model of type {config.get('model_type')}; {known} can be converted.")
