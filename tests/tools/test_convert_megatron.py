"""From Megatron: files of every format give the logits of the model that they were made from, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import convert_from_megatron
import pytest
import torch
from generate_text import load_model, open_checkpoint
from harness.megatron_files import (
    ITERATION,
    ROWS,
    SAMPLES,
    core_names,
    old_names,
    random_model,
    write_deepspeed,
    write_legacy,
    write_torch_dist,
)
from harness.small_gpt import LLAMA, VOCAB
from torch import Tensor

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.model.gpt import GPT

GPT2 = {"num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": GPT2,
    "GPT-2, exact GELU, untied": {**GPT2, "no_bias_gelu_fusion": True, "untie_embeddings_and_output_weights": True},
    "gains minus 1, squared ReLU": {**GPT2, "apply_layernorm_1p": True, "squared_relu": True},
    "Llama": LLAMA,
    "Qwen3, tied": LLAMA | {"qk_layernorm": True, "untie_embeddings_and_output_weights": False},
    "Qwen2": LLAMA | {"add_qkv_bias": True},
}
Writer = Callable[..., Path]
FORMATS: dict[str, Writer] = {
    "torch": write_legacy,
    "torch, norms apart": partial(write_legacy, names=partial(core_names, is_fused=False)),
    "torch, before the core": partial(write_legacy, names=old_names, version=2),
    "torch, file of before torch 1.6": partial(write_legacy, names=old_names, version=2, _use_new_zipfile_serialization=False),
    "torch_dist": write_torch_dist,
    "torch_dist, layers apart": partial(write_torch_dist, is_stacked=False, has_common_file=False),
    "DeepSpeed": write_deepspeed,
    "DeepSpeed, pipeline": partial(write_deepspeed, kind="pipeline"),
    "DeepSpeed, stage 3": partial(write_deepspeed, kind="stage 3"),
}
# Every format with every model, and with one and two tensor ranks, in pairs.
PAIRS = (
    [
        (form, model, 1 + (number + index) % 2)
        for number, form in enumerate(FORMATS)
        for index, model in enumerate(MODELS)
        if index % 2 == number % 2
    ]
    + [(form, "Llama", 2) for form in FORMATS]
    + [(form, "GPT-2", 1) for form in FORMATS]
)


def convert(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Runs the tool in this process, which saves the start of another."""
    monkeypatch.setattr(sys, "argv", ["convert_from_megatron.py", *map(str, arguments)])
    convert_from_megatron.main()


def logits(model: GPT) -> Tensor:
    tokens = torch.randint(VOCAB, (3, model.config.seq_length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model.eval()(tokens, None, first_sample=0)


def imported(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> GPT:
    convert(monkeypatch, "--input", source, "--output", tmp_path / "imported", *arguments)
    return load_model(open_checkpoint(tmp_path / "imported", None))


@pytest.mark.parametrize("form, name, ranks", sorted(set(PAIRS)))
def test_an_imported_model_has_the_logits_of_the_one_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, name: str, ranks: int
) -> None:
    model = random_model(**MODELS[name])
    source = FORMATS[form](tmp_path / "megatron", model, ranks)
    found = imported(tmp_path, source, monkeypatch)
    assert found.config.num_query_groups == model.config.key_value_heads
    assert torch.equal(logits(found), logits(model))
    assert logits(model).abs().max() > 1  # large enough that a mistake would show
