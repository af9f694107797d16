"""Runs without data or without a length."""

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.defaults import banner
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
ASSUMED = {
    "mock_data": (True, "--mock-data", None),
    "tokenizer_type": ("NullTokenizer", "--tokenizer-type NullTokenizer", None),
    "vocab_size": (50257, "--vocab-size 50257", "--vocab-size 1000"),
    "train_iters": (50, "--train-iters 50", None),
    "lr": (3e-4, "--lr 0.0003", "--lr 0.5"),
    "lr_decay_style": ("constant", "--lr-decay-style constant", "--lr-decay-style linear"),
    "log_interval": (10, "--log-interval 10", "--log-interval 100"),
}


def resolved(flags):
    return resolve(parse_flags((SHAPE + flags).split()), 1, None)


def test_benchmark_mode_assumes_data_length_and_learning_rate_and_says_so():
    config = resolved("")
    assert {name: config.value_of(name) for name in ASSUMED} == {name: value for name, (value, _, _) in ASSUMED.items()}
    assert config.assumptions[0] == "benchmark mode: neither data nor a length of training is given"
    assert list(config.assumptions[1:]) == [line for _, line, _ in ASSUMED.values()]
    assert config.notices == ()


@pytest.mark.parametrize("name", [name for name, (_, _, other) in ASSUMED.items() if other])
def test_given_value_wins_over_the_assumption_even_where_it_is_the_default(name):
    _, line, other = ASSUMED[name]
    config = resolved(other)
    assert line not in config.assumptions
    assert str(config.value_of(name)) == other.split()[1]
    assert len(config.assumptions) == len(ASSUMED)


def test_benchmark_mode_in_fp16_assumes_deepspeeds_first_loss_scale():
    config = resolved("--fp16")
    assert config.precision.initial_loss_scale == 65536.0
    assert config.assumptions[-1] == "--initial-loss-scale 65536.0"


@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --initial-loss-scale 8", "--fp16 --loss-scale 8", "--fp16 --min-loss-scale 1e6"])
def test_a_loss_scale_that_is_given_or_of_no_use_is_not_assumed(flags):
    config = resolved(flags)
    assert not [line for line in config.assumptions if "loss-scale" in line]
    assert config.precision.initial_loss_scale == (8.0 if "initial" in flags else 2.0**32)


def test_mock_data_alone_is_still_benchmark_mode():
    config = resolved("--mock-data")
    assert config.training.train_iters == 50
    assert "--mock-data" not in config.assumptions


def test_mock_data_that_were_asked_for_are_not_called_missing_data():
    config = resolved("--mock-data --train-iters 7")
    assert config.assumptions == ("training on mock data", "--tokenizer-type NullTokenizer", "--vocab-size 50257")


def test_length_without_data_assumes_mock_data_and_keeps_megatrons_other_defaults():
    config = resolved("--train-iters 7")
    assert config.assumptions == (
        "no data is given: training on mock data",
        "--mock-data",
        "--tokenizer-type NullTokenizer",
        "--vocab-size 50257",
    )
    assert (config.training.train_iters, config.optimizer.lr_decay_style, config.logging.log_interval) == (7, "linear", 100)
    assert config.notices == ("--lr is not given: 0.0003 is used",)


def test_mock_data_with_a_real_tokenizer_keeps_it():
    for length in ("--train-iters 7 ", ""):
        config = resolved(f"{length}--mock-data --tokenizer-type SentencePieceTokenizer --tokenizer-model m")
        assert (config.data.tokenizer_type, config.data.vocab_size) == ("SentencePieceTokenizer", None)
        assert "--mock-data" not in config.assumptions


@pytest.mark.parametrize("length", ["", "--train-iters 7 --save saved "])
@pytest.mark.parametrize(
    "tokenizer",
    [
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model m",
        "--tokenizer-model m",
        "--vocab-file v --merge-file m",
        "--tokenizer-type TikTokenizer",
    ],
)
def test_a_tokenizer_without_data_is_refused_rather_than_trained_on_generated_tokens(length, tokenizer):
    with pytest.raises(
        FlagError, match=r"names a tokenizer, but no flag names data; give --data-path, or --mock-data to train on gen"
    ) as error:
        resolved(length + tokenizer)
    assert tokenizer in str(error.value)


def test_the_tokenizer_of_generated_tokens_needs_no_data():
    assert resolved("--train-iters 7 --tokenizer-type NullTokenizer --vocab-size 100").data.mock_data


def test_gpt2_files_without_a_type_are_a_gpt2_tokenizer():
    for data in ("--mock-data ", "--data-path corpus "):
        config = resolved(data + "--train-iters 7 --lr 1 --vocab-file v --merge-file m")
        assert (config.data.tokenizer_type, config.data.vocab_size) == ("GPT2BPETokenizer", None)
        assert "--tokenizer-type is not given: GPT2BPETokenizer is used, to which --vocab-file and --merge-file belong" in config.notices


def test_fully_said_mock_run_assumes_nothing():
    config = resolved("--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --train-iters 7 --lr 1")
    assert (config.assumptions, config.notices) == ((), ())


def test_banner_holds_every_line_and_is_empty_without_assumptions():
    config = resolved("")
    lines = banner(config).splitlines()
    assert "BENCHMARK MODE" in lines[1]
    assert [line.removeprefix("*   ") for line in lines[2:-2]] == list(config.assumptions[1:])
    assert banner(parse_flags([])) == ""
