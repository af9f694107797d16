"""What a run assumes where the user gave no data or no length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.options import spelling_of
from megatron_zpp.config.schema import TOKENIZER_FILES, Config

DEFAULT_LR = 3e-4
MOCK_VOCAB_SIZE = 50257  # GPT-2's, padded to 50304 by default
DEEPSPEED_LOSS_SCALE = 2.0**16  # from Megatron's 2^32 a run would skip its first dozens of steps
BENCHMARK_VALUES: dict[str, Any] = {"train_iters": 50, "lr": DEFAULT_LR, "lr_decay_style": "constant", "log_interval": 10}


def assume(config: Config) -> Config:
    """The configuration with data, length and learning rate, and one line in `assumptions` or `notices` per value put in.

    Without data and length this is the benchmark mode: mock data, a short run, a constant learning rate.
    Raises FlagError for data without a length or without a tokenizer.
    """
    config = _with_gpt2_tokenizer(config)
    if config.data.names_corpora:
        _check_data_has_length_and_tokenizer(config)
        return _with_learning_rate(_with_loss_scale(config))
    if _has_length(config):
        headline = "no data is given: training on mock data"
        return _with_learning_rate(_with_loss_scale(_assuming(config, headline, _mock_values(config))))
    headline = "benchmark mode: neither data nor a length of training is given"
    loss_scale = {"initial_loss_scale": DEEPSPEED_LOSS_SCALE} if _has_open_loss_scale(config) else {}
    return _assuming(config, headline, {**_mock_values(config), **BENCHMARK_VALUES, **loss_scale})


def banner(config: Config) -> str:
    """The assumptions framed by lines of stars, or an empty string where nothing was assumed."""
    if not config.assumptions:
        return ""
    headline, *lines = config.assumptions
    frame = "*" * 80
    return "\n".join([frame, f"* {headline.upper()}", *(f"*   {line}" for line in lines), "* each of these flags wins when given", frame])


def _has_length(config: Config) -> bool:
    training = config.training
    return any(length is not None for length in (training.train_iters, training.train_samples, training.train_tokens))


def _check_data_has_length_and_tokenizer(config: Config) -> None:
    data_path = " ".join(config.data.data_path)
    corpora = f"--data-path {data_path}" if data_path else "the data"
    if not _has_length(config):
        raise FlagError(f"{corpora} needs a length of training; give --train-iters or --train-samples.")
    if config.data.tokenizer_type is None:
        raise FlagError(
            f"{corpora} needs its tokenizer; give --tokenizer-type GPT2BPETokenizer with --vocab-file and --merge-file, "
            "NullTokenizer with --vocab-size, or another with --tokenizer-model."
        )


def _with_gpt2_tokenizer(config: Config) -> Config:
    data = config.data
    if data.tokenizer_type is not None or data.vocab_file is None or data.merge_file is None:
        return config
    line = "--tokenizer-type is not given: GPT2BPETokenizer is used, to which --vocab-file and --merge-file belong"
    return config.with_values(tokenizer_type="GPT2BPETokenizer").with_notices(line)


def _mock_values(config: Config) -> dict[str, Any]:
    tokenizer_type = config.data.tokenizer_type
    if tokenizer_type is None and not any(config.value_of(name) for name in TOKENIZER_FILES):
        tokenizer_type = "NullTokenizer"
    if tokenizer_type != "NullTokenizer":
        return {"mock_data": True}
    return {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": MOCK_VOCAB_SIZE}


def _with_learning_rate(config: Config) -> Config:
    if config.optimizer.lr is not None:
        return config
    return config.with_values(lr=DEFAULT_LR).with_notices(f"--lr is not given: {DEFAULT_LR} is used")


def _with_loss_scale(config: Config) -> Config:
    if config.zero.deepspeed_config is None or not _has_open_loss_scale(config):
        return config
    line = f"--initial-loss-scale is not given: {DEEPSPEED_LOSS_SCALE} is used, as DeepSpeed has it"
    return config.with_values(initial_loss_scale=DEEPSPEED_LOSS_SCALE).with_notices(line)


def _has_open_loss_scale(config: Config) -> bool:
    precision = config.precision
    is_open = precision.fp16 and precision.loss_scale is None and "initial_loss_scale" not in config.given
    return is_open and precision.min_loss_scale <= DEEPSPEED_LOSS_SCALE


def _assuming(config: Config, headline: str, values: dict[str, Any]) -> Config:
    assumed = {name: value for name, value in values.items() if name not in config.given}
    if not assumed:
        return config
    lines = (_line(name, value) for name, value in assumed.items())
    return replace(config.with_values(**assumed), assumptions=(headline, *lines))


def _line(name: str, value: Any) -> str:
    return spelling_of(name) if value is True else f"{spelling_of(name)} {value}"
