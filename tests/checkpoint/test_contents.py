"""Whether a checkpoint holds this model, by shapes and by flags that change no shape, and whether it holds the optimizer's state."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.checkpoint.contents import check_model, check_moments, rotation_differences
from megatron_zpp.checkpoint.manifest import CheckpointError, Manifest
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.shapes import ModelShape

FOLDER = Path("saved/iter_0000003")
GPT2 = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
ROPE = f"{GPT2} --position-embedding-type rope"
SCALED = f"{ROPE} --use-rope-scaling --rope-scaling-original-max-position-embeddings 16"
UNSCALED_AND_SCALED = "--use-rope-scaling False there and True here; --rope-scaling-factor 8.0 there and 32.0 here"
# The flags in a checkpoint that was written before other architectures existed.
OLD_FLAGS = "num_layers hidden_size num_attention_heads kv_channels ffn_hidden_size max_position_embeddings norm_epsilon".split()


def model(words: str) -> ModelConfig:
    return resolve(parse_flags(words.split()), 1, None).model


def manifest(config: ModelConfig, flags: dict[str, Any] | None = None) -> Manifest:
    """The manifest of a checkpoint of this model without optimizer state."""
    shapes = {param.name: param.whole_shape for unit in ModelShape(config, 128).unit_specs() for param in unit.params}
    return Manifest(3, 12, shapes, {"weight": "F32"}, {}, {"model": flags or asdict(config)}, {}, {})


def check(there: Manifest, here: str, *, may_rotate_otherwise: bool = False) -> None:
    config = model(here)
    check_model(FOLDER, there, config, ModelShape(config, 128).unit_specs(), may_rotate_otherwise=may_rotate_otherwise)


def test_a_checkpoint_from_before_there_were_architectures_is_a_gpt2() -> None:
    config = model(GPT2)
    old = manifest(config, {name: getattr(config, name) for name in OLD_FLAGS})
    check(old, GPT2)
    with pytest.raises(CheckpointError, match="holds another model: --squared-relu False there and True here; give the flags"):
        check(old, f"{GPT2} --squared-relu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--rotary-percent 0.5", "--rotary-percent 1.0 there and 0.5 here"),
        ("--rotary-interleaved", "--rotary-interleaved False there and True here"),
        ("--num-query-groups 2", "--num-query-groups 4 there and 2 here"),
        ("--apply-layernorm-1p", "--apply-layernorm-1p False there and True here"),
        ("--normalization RMSNorm", "--normalization LayerNorm there and RMSNorm here"),
    ],
)
@pytest.mark.parametrize("may_rotate_otherwise", [True, False])
def test_another_function_of_the_same_weights_is_refused(changed: str, message: str, may_rotate_otherwise: bool) -> None:
    with pytest.raises(CheckpointError, match=f"holds another model: {message}"):
        check(manifest(model(ROPE)), f"{ROPE} {changed}", may_rotate_otherwise=may_rotate_otherwise)


@pytest.mark.parametrize(
    ("there", "here", "difference"),
    [
        (ROPE, f"{ROPE} --rotary-base 500000", "--rotary-base 10000.0 there and 500000.0 here"),
        (ROPE, f"{ROPE} --rotary-seq-len-interpolation-factor 2", "--rotary-seq-len-interpolation-factor 1.0 there and 2.0 here"),
        (ROPE, f"{ROPE} --use-rope-scaling", "--use-rope-scaling False there and True here"),
        (ROPE, f"{ROPE} --use-rope-scaling --rope-scaling-factor 32", UNSCALED_AND_SCALED),
        (SCALED, f"{SCALED} --rope-scaling-factor 32", "--rope-scaling-factor 8.0 there and 32.0 here"),
    ],
)
def test_only_weights_alone_may_rotate_at_another_speed(there: str, here: str, difference: str) -> None:
    stored = manifest(model(there))
    with pytest.raises(CheckpointError, match=f"other rotary positions: {difference}.*or --finetune"):
        check(stored, here)
    check(stored, here, may_rotate_otherwise=True)
    assert rotation_differences(stored, model(here)) == difference.split("; ")


def test_a_limit_of_positions_counts_only_where_they_are_learned() -> None:
    check(manifest(model(ROPE)), f"{ROPE} --seq-length 32")
    check(manifest(model(f"{GPT2} --position-embedding-type none")), f"{GPT2} --position-embedding-type none --seq-length 32")
    with pytest.raises(CheckpointError, match="--max-position-embeddings 16 there and 32 here"):
        check(manifest(model(GPT2)), f"{GPT2} --seq-length 32")


def test_flags_of_a_rotation_that_does_not_take_place_are_no_difference() -> None:
    unscaled, learned = asdict(model(ROPE)) | {"rope_scaling_factor": 32.0}, asdict(model(GPT2)) | {"rotary_base": 5e5}
    check(manifest(model(ROPE), unscaled), ROPE)
    check(manifest(model(GPT2), learned), GPT2)


def test_the_first_parameter_of_another_shape_is_named() -> None:
    stored = manifest(model(GPT2))
    shapes = {**stored.shapes, "embedding.word.weight": (64, 32)}
    with pytest.raises(CheckpointError, match=r"embedding.word.weight has shape \(64, 32\) there and \(128, 32\) here"):
        check(Manifest(3, 12, shapes, stored.states, {}, stored.flags, {}, {}), GPT2)


def test_another_kernel_is_the_same_function() -> None:
    check(manifest(model(GPT2)), f"{GPT2} --attention-backend unfused --norm-backend apex")


def test_weights_alone_hold_no_optimizer_state() -> None:
    with pytest.raises(CheckpointError, match="iter_0000003 holds no optimizer state; give --no-load-optim or --finetune"):
        check_moments(FOLDER, manifest(model(GPT2)))
