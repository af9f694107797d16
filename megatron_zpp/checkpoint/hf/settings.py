"""Reads the settings of a config.json: each in the kind and the bounds of the flag that it becomes, or refused by its key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_zpp.config.flag import Bounds, any_of
from megatron_zpp.config.options import options
from megatron_zpp.system.outside import Members

# Settings that change what weights compute, and that no layout here has, with the values that leave the function as it is.
WITHOUT_CHANGE: Mapping[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (1, None),
    "final_logit_softcapping": (None,),
    "is_causal": (True,),
    "logit_scale": (1, None),
    "logits_scaling": (1, None),
    "no_rope_layer_interval": (None,),
    "no_rope_layers": ([], None),
    "num_experts": (0, 1, None),
    "num_local_experts": (0, 1, None),
    "partial_rotary_factor": (1, None),
    "per_layer_config": (None,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "residual_multiplier": (1, None),
}
FULL_ATTENTION = "full_attention"
_OPTIONS = {option.name: option for option in options()}


def setting(config: Members, key: str, field: str) -> Any:
    """The number of this key. Raises UserError unless it has the kind and the bounds of the flag of `field`."""
    option = _OPTIONS[field]
    value = config.positive_count(key) if option.kind is int else config.number(key)
    allowed = option.flag.allowed
    if isinstance(allowed, Bounds) and not allowed.contain(value):
        config.refuse(key, f"a number that is {allowed.broken_by(value)}")
    return value


def require(config: Members, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises UserError for a key whose value this model does not compute. allowed: of each key, the values that it does."""
    for key, values in allowed.items():
        if key in config and not any(_is_same(config.any(key), value) for value in values):
            config.refuse(key, f"{any_of([json.dumps(value) for value in values])} for this model to compute it")


def require_full_attention(config: Members, layers: int) -> None:
    """Raises UserError unless layer_types is null, is missing, or has full attention for each of the layers."""
    if config.values.get("layer_types") is None:
        return
    types = config.texts("layer_types")
    if len(types) != layers or any(kind != FULL_ATTENTION for kind in types):
        config.refuse("layer_types", f"{FULL_ATTENTION} for each of {layers} layers")


def _is_same(value: Any, allowed: Any) -> bool:
    """Whether they are equal. To Python, but not in JSON, true is equal to 1."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)
