"""The shape of a model, computed without one, equals that of the model."""

from __future__ import annotations

import pytest
import torch

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.shapes import ModelShape

LLAMA = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --seq-length 16 --normalization RMSNorm "
LLAMA += "--disable-bias-linear --position-embedding-type rope"
SHAPES = {
    "plain": "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16",
    "untied": "--num-layers 3 --hidden-size 48 --num-attention-heads 4 --seq-length 16 --untie-embeddings-and-output-weights",
    "odd": "--num-layers 1 --hidden-size 24 --num-attention-heads 2 --kv-channels 20 --ffn-hidden-size 50 --seq-length 8 "
    "--max-position-embeddings 11",
    "llama": f"{LLAMA} --swiglu --ffn-hidden-size 40 --untie-embeddings-and-output-weights",
    "qwen2": f"{LLAMA} --swiglu --ffn-hidden-size 40 --add-qkv-bias --qk-layernorm",
    "biased": "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --no-position-embedding --qk-layernorm "
    "--squared-relu --group-query-attention --apply-layernorm-1p",
}


def config_of(name: str) -> ModelConfig:
    return resolve(parse_flags(SHAPES[name].split()), 1, None).model


@pytest.mark.parametrize("name", list(SHAPES))
def test_units_have_the_parameters_of_the_models_modules(name: str) -> None:
    shape, model = ModelShape(config_of(name), 104), GPT(config_of(name), 104, 1, torch.float32)
    modules = {"embedding": "embedding", "final_norm": "final.norm", "head": "final.head"}
    for unit in shape.unit_specs():
        path = modules.get(unit.name, unit.name.replace("block.", "blocks."))
        parameters = model.get_submodule(path).named_parameters(prefix=path)
        expected = [(name, tuple(parameter.shape), parameter.ndim > 1) for name, parameter in parameters]
        assert [(param.name, param.shape, param.weight_decay) for param in unit.params] == expected


def test_values_of_a_shape_are_refused() -> None:
    spec = ModelShape(config_of("plain"), 104).unit_specs()[0].params[0]
    with pytest.raises(RuntimeError, match="has no values"):
        spec.initial_values(0, 1)
