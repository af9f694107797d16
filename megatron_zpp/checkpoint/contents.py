"""Checks that a checkpoint holds what a run needs: the same model, and the optimizer's state (no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_zpp.checkpoint.manifest import CheckpointError, Manifest
from megatron_zpp.checkpoint.older_flags import flags_of
from megatron_zpp.config.flag import spelling_of
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.parallel.specs import UnitSpec

# Flags that decide what the weights compute. Shapes alone do not show it: the number of heads, for example, changes no shape.
MODEL_FLAGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_channels",
    "ffn_hidden_size",
    "position_embedding_type",
    "num_query_groups",
    "normalization",
    "apply_layernorm_1p",
    "qk_layernorm",
    "swiglu",
    "squared_relu",
    "norm_epsilon",
    "untie_embeddings_and_output_weights",
)
# The same for one type of positions only.
POSITION_FLAGS = {"learned_absolute": ("max_position_embeddings",), "rope": ("rotary_percent", "rotary_interleaved")}
# How fast positions rotate. These change when trained weights are trained further with a longer context.
ROTATION_FLAGS = (
    "rotary_base",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
)
# The value of a flag in a checkpoint that was written before the flag existed.
DEFAULTS = {member.name: member.default for member in fields(ModelConfig)}

Shapes = Mapping[str, tuple[int, ...]]


def check_model(folder: Path, manifest: Manifest, model: ModelConfig, units: Sequence[UnitSpec], *, may_rotate_otherwise: bool) -> None:
    """Raises CheckpointError, naming the flags or the first parameter that differ, if the checkpoint in `folder` holds another model.

    The model is the same if all shapes are equal and the weights compute the same function.
    may_rotate_otherwise: whether positions may rotate at another speed.
    """
    differing = _differences(manifest, model, (*MODEL_FLAGS, *POSITION_FLAGS.get(model.position_embedding_type, ())))
    differing += _difference_of_gelu(manifest, model)
    rotation = [] if may_rotate_otherwise else rotation_differences(manifest, model)
    stored, expected = manifest.shapes, {param.name: param.whole_shape for unit in units for param in unit.params}
    if not differing and dict(stored) != expected:
        differing = [first_difference(stored, expected)]
    if not differing and rotation:
        raise CheckpointError(
            f"{folder} was trained with other rotary positions: {'; '.join(rotation)}; give the flags of the checkpoint, or --finetune to "
            "train its weights with the given ones"
        )
    if differing:
        raise CheckpointError(
            f"{folder} holds another model: {'; '.join([*differing, *rotation])}; give the flags of the checkpoint or another --load"
        )


def rotation_differences(manifest: Manifest, model: ModelConfig) -> list[str]:
    """The flags for the rotation of positions that have an effect and differ from the checkpoint's, each with both values."""
    stored = _flags(manifest)
    if model.position_embedding_type != "rope":
        return []
    is_scaled = model.use_rope_scaling or stored["use_rope_scaling"]
    return _differences(manifest, model, [name for name in ROTATION_FLAGS if is_scaled or not name.startswith("rope_scaling")])


def check_moments(folder: Path, manifest: Manifest, remedy: str = "give --no-load-optim or --finetune to train without it") -> None:
    """Raises CheckpointError if the checkpoint in `folder` holds only weights."""
    if len(manifest.states) < 2:
        raise CheckpointError(f"{folder} holds no optimizer state; {remedy}")


def _differences(manifest: Manifest, model: ModelConfig, names: Sequence[str]) -> list[str]:
    stored = _flags(manifest)
    return [
        f"{spelling_of(name)} {stored[name]} there and {getattr(model, name)} here"
        for name in names
        if stored[name] is not None and stored[name] != getattr(model, name)
    ]


def _difference_of_gelu(manifest: Manifest, model: ModelConfig) -> list[str]:
    stored = ModelConfig(**{name: value for name, value in _flags(manifest).items() if name in DEFAULTS})
    if stored.has_exact_gelu == model.has_exact_gelu:
        return []
    there, here = ("exact" if config.has_exact_gelu else "by tanh" for config in (stored, model))
    return [f"GELU {there} there and {here} here (--no-bias-gelu-fusion, --openai-gelu)"]


def _flags(manifest: Manifest) -> dict[str, Any]:
    return DEFAULTS | flags_of(manifest, "model")


def first_difference(stored: Shapes, expected: Shapes) -> str:
    """The first name whose shapes differ, with both of them."""
    name = min(name for name in {*stored, *expected} if stored.get(name) != expected.get(name))
    return f"{name} has shape {stored.get(name)} there and {expected.get(name)} here"
