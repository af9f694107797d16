"""Sizes of the model that tensor ranks cannot share are refused with flag, value, rule and remedy."""

from __future__ import annotations

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.rules_tensor import check_tensor_ranks
from megatron_zpp.config.schema import ModelConfig

GPT2 = "--num-layers 1 --hidden-size 768 --num-attention-heads 12 --seq-length 1024"


def model_of(flags: str) -> ModelConfig:
    return resolve(parse_flags(f"{GPT2} {flags}".split()), 1, None).model


@pytest.mark.parametrize(
    ("flags", "rows", "ranks", "words"),
    [
        (
            "",
            50304,
            8,
            "--num-attention-heads 12 is not a multiple of --tensor-model-parallel-size 8; choose --tensor-model-parallel-size 1, 2 or 4.",
        ),
        (
            "--ffn-hidden-size 1002",
            50304,
            4,
            "--ffn-hidden-size 1002 is not a multiple of --tensor-model-parallel-size 4; choose --tensor-model-parallel-size 1 or 2.",
        ),
        (
            "--num-query-groups 4",
            50304,
            6,
            "--num-query-groups 4 and --tensor-model-parallel-size 6: one must divide the other, so that groups are dealt to ranks or "
            "ranks to groups; choose --tensor-model-parallel-size 1, 2 or 4.",
        ),
        (
            "--num-attention-heads 10 --kv-channels 64 --ffn-hidden-size 1000",
            50304,
            5,
            "the vocabulary of 50304 rows (padded to a multiple of --make-vocab-size-divisible-by 128) is not a multiple of "
            "--tensor-model-parallel-size 5; give --make-vocab-size-divisible-by 640 or --padded-vocab-size.",
        ),
        (
            "--padded-vocab-size 50257 --make-vocab-size-divisible-by 1",
            50257,
            4,
            "the vocabulary of 50257 rows (--padded-vocab-size) is not a multiple of --tensor-model-parallel-size 4; "
            "give --padded-vocab-size 50260.",
        ),
        (
            "--max-position-embeddings 1025",
            50304,
            4,
            "--max-position-embeddings 1025 is not a multiple of --tensor-model-parallel-size 4; choose 1028.",
        ),
    ],
)
def test_a_size_that_the_ranks_cannot_share_is_refused_with_flag_value_rule_and_remedy(
    flags: str, rows: int, ranks: int, words: str
) -> None:
    with pytest.raises(FlagError) as found:
        check_tensor_ranks(model_of(flags), rows, ranks)
    assert str(found.value) == words


@pytest.mark.parametrize("flags", ["", "--num-query-groups 4", "--position-embedding-type rope", "--ffn-hidden-size 1002"])
def test_the_sizes_that_an_error_names_are_accepted(flags: str) -> None:
    with pytest.raises(FlagError) as found:
        check_tensor_ranks(model_of(flags), 50304, 5)
    choices = str(found.value).split("choose --tensor-model-parallel-size ")[1].rstrip(".").replace(" or ", ", ").split(", ")
    for size in map(int, choices):
        check_tensor_ranks(model_of(flags), 50304 * size, size)


def test_rotary_positions_are_not_divided() -> None:
    check_tensor_ranks(model_of("--position-embedding-type rope --max-position-embeddings 1025"), 50304, 4)
