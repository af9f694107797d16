"""Whether a checkpoint holds this model: shapes, and the flags that leave no trace in shapes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.manifest import CheckpointError
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.release import write_release
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.validate import resolve
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec

UNITS = [UnitSpec("u", (ParamSpec("w", (3,), lambda start, stop: torch.zeros(stop - start), weight_decay=False),))]
SHAPES = {"w": (3,)}
GPT2 = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
# What a checkpoint says that was written before there was a choice of architectures.
OLD_FLAGS = "num_layers hidden_size num_attention_heads kv_channels ffn_hidden_size max_position_embeddings norm_epsilon".split()


def flags(words: str) -> dict[str, Any]:
    return asdict(resolve(parse_flags(words.split()), 1, None).model)


def reader(folder: Path, model: dict[str, Any]) -> CheckpointReader:
    write_release(folder, UNITS, lambda name: torch.zeros(3), {"model": model})
    return CheckpointReader(folder / "release")


def test_a_checkpoint_from_before_there_were_architectures_is_a_gpt2(tmp_path: Path) -> None:
    old = {name: flags(GPT2)[name] for name in OLD_FLAGS}
    with reader(tmp_path, old) as checkpoint:
        checkpoint.check_model(SHAPES, flags(GPT2))
        with pytest.raises(CheckpointError, match="holds another model: --squared-relu False there and True here; give the flags"):
            checkpoint.check_model(SHAPES, flags(f"{GPT2} --squared-relu"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--rotary-base 500000", "--rotary-base 10000.0 there and 500000.0 here"),
        ("--rotary-interleaved", "--rotary-interleaved False there and True here"),
        ("--use-rope-scaling", "--use-rope-scaling False there and True here"),
        ("--num-query-groups 2", "--num-query-groups 4 there and 2 here"),
        ("--apply-layernorm-1p", "--apply-layernorm-1p False there and True here"),
        ("--normalization RMSNorm", "--normalization LayerNorm there and RMSNorm here"),
    ],
)
def test_another_function_of_the_same_weights_is_refused(tmp_path: Path, changed: str, message: str) -> None:
    rope = f"{GPT2} --position-embedding-type rope"
    with reader(tmp_path, flags(rope)) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.check_model(SHAPES, flags(f"{rope} {changed}"))


def test_another_kernel_is_the_same_function(tmp_path: Path) -> None:
    with reader(tmp_path, flags(GPT2)) as checkpoint:
        checkpoint.check_model(SHAPES, flags(f"{GPT2} --attention-backend unfused --norm-backend apex"))
