"""The shapes in scripts/models have the published numbers of parameters; no weights are allocated."""

from __future__ import annotations

import math
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.data.tokenizers.tokenizer import embedding_rows
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.training.sharding import shape_of

MODELS = Path(__file__).parents[2] / "scripts" / "models"
GPT2_VOCABULARY = 50257

# Rows of the embedding and parameters of the published weights.
EXACT = {
    "gpt2_small": (GPT2_VOCABULARY, 124_439_808),
    "gpt2_medium": (GPT2_VOCABULARY, 354_823_168),
    "gpt2_large": (GPT2_VOCABULARY, 774_030_080),
    "gpt2_xl": (GPT2_VOCABULARY, 1_557_611_200),
    "llama2_7b": (32000, 6_738_415_616),
    "llama2_13b": (32000, 13_015_864_320),
    "llama2_70b": (32000, 68_976_648_192),
    "llama3.1_8b": (128256, 8_030_261_248),
    "llama3.1_70b": (128256, 70_553_706_496),
    "qwen2_0.5b": (151936, 494_032_768),
    "qwen2_7b": (152064, 7_615_616_512),
}
# In millions, from GPT-3's table 2.1. Its names are rounded: 350M means 356M.
ROUNDED = {
    "gpt3_125m": (125, 1),
    "gpt3_350m": (356, 1),
    "gpt3_760m": (760, 1),
    "gpt3_1.3b": (1300, 100),
    "gpt3_2.7b": (2700, 100),
    "gpt3_6.7b": (6700, 100),
    "gpt3_13b": (13000, 1000),
    "gpt3_175b": (175000, 1000),
}


@pytest.fixture(scope="module")
def flags_of() -> dict[str, list[str]]:
    """The words of every model, as bash makes them of its file."""
    print_all = 'for file in "$@"; do source "$file"; echo "$(basename "$file" .sh) ${MODEL_ARGS[*]}"; done'
    files = [str(path) for path in sorted(MODELS.glob("*.sh"))]
    listed = subprocess.run(["bash", "-euc", print_all, "bash", *files], capture_output=True, text=True, check=True).stdout
    words = [shlex.split(line) for line in listed.splitlines()]
    return {name: flags for name, *flags in words}


def resolved(flags: list[str]) -> Config:
    """The configuration in a world of the ranks that share layers."""
    given = parse_flags(flags)
    ranks = given.distributed.tensor_model_parallel_size
    return resolve(given, ranks, ranks)


def parameters(flags: list[str], vocabulary_rows: int) -> int:
    model = ModelShape(resolved(flags).model, vocabulary_rows)
    return sum(math.prod(param.whole_shape) for unit in model.unit_specs() for param in unit.params)


@pytest.mark.parametrize("name", list(EXACT))
def test_the_shape_has_the_parameters_of_the_published_weights_to_the_last(flags_of: dict[str, list[str]], name: str) -> None:
    rows, published = EXACT[name]
    assert parameters(flags_of[name], rows) == published


@pytest.mark.parametrize("name", list(ROUNDED))
def test_the_shape_has_the_published_parameters_to_the_digits_of_its_table(flags_of: dict[str, list[str]], name: str) -> None:
    published_millions, digit_millions = ROUNDED[name]
    millions = parameters(flags_of[name], GPT2_VOCABULARY) / 1e6
    assert round(millions / digit_millions) * digit_millions == published_millions


def test_eight_ranks_share_the_layers_of_the_largest_shapes_and_others_are_whole(flags_of: dict[str, list[str]]) -> None:
    rows = {name: rows for name, (rows, _) in EXACT.items()} | dict.fromkeys(ROUNDED, GPT2_VOCABULARY)
    sizes = {}
    for name, flags in flags_of.items():
        config = resolved(flags)
        part = shape_of(config, embedding_rows(config.model, rows[name]))
        sizes[name] = part.tensor_ranks
        assert part.sequence_parallel == (part.tensor_ranks > 1)
    assert {name: size for name, size in sizes.items() if size > 1} == {"llama2_70b": 8, "llama3.1_70b": 8, "gpt3_175b": 8}


def test_every_shape_is_among_the_published_ones(flags_of: dict[str, list[str]]) -> None:
    assert flags_of.keys() == EXACT.keys() | ROUNDED.keys()


def test_a_flag_after_a_shape_wins_over_it(flags_of: dict[str, list[str]]) -> None:
    assert resolve(parse_flags([*flags_of["llama3.1_8b"], "--seq-length", "4096"]), 1, None).model.seq_length == 4096
