"""Fills in what the flags leave open: assumptions where data or length are missing, and values that follow from flags and world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from megatron_zpp.config.batch_schedule import BatchSchedule, horizons, length_in_samples
from megatron_zpp.config.flag import FlagError, in_words
from megatron_zpp.config.groups.data import TOKENIZER_FILES
from megatron_zpp.config.ranks import RankCounts
from megatron_zpp.config.schema import Config, ModelConfig

T = TypeVar("T")

DEFAULT_LR = 3e-4
MOCK_VOCAB_SIZE = 50257  # GPT-2's, padded to 50304 by default
DEEPSPEED_LOSS_SCALE = 2.0**16  # Megatron's 2^32 takes 16 more skipped steps to fall this far
# Published rates grow with the period, up to about 0.7 (arXiv 2503.09799, table 5): 0.4 at 16 inner steps was best in experiments with this
# program's codes.
LARGEST_OUTER_LR, OUTER_LR_OF_AN_ITERATION = 0.7, 1 / 40
BENCHMARK_VALUES: dict[str, Any] = {"train_iters": 50, "lr": DEFAULT_LR, "lr_decay_style": "constant", "log_interval": 10}


def assume(config: Config) -> Config:
    """The configuration with data, length and learning rate. Each value that is filled in has a line in `assumptions` or `notices`.

    If both data and length are missing, the run is a benchmark: mock data, a short run, a constant learning rate.
    Raises FlagError for data without a length or without a tokenizer, and for a tokenizer without data.
    """
    config = _with_gpt2_tokenizer(config)
    if config.data.names_corpora:
        _check_data_has_length_and_tokenizer(config)
        return _with_learning_rate(_with_loss_scale(config))
    _check_no_data_are_forgotten(config)
    if _has_length(config):
        headline = "training on mock data" if config.data.mock_data else "no data is given: training on mock data"
        return _with_learning_rate(_with_loss_scale(_assuming(config, headline, _mock_values(config))))
    headline = "benchmark mode: neither data nor a length of training is given"
    loss_scale = {"initial_loss_scale": DEEPSPEED_LOSS_SCALE} if _has_open_loss_scale(config) else {}
    return _assuming(config, headline, {**_mock_values(config), **BENCHMARK_VALUES, **loss_scale})


def banner(config: Config) -> str:
    """The assumptions framed by lines of stars, or an empty string if nothing was assumed."""
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


def _check_no_data_are_forgotten(config: Config) -> None:
    """Raises FlagError if the flags name the tokenizer of a text, but neither a text nor --mock-data."""
    tokenizer = _named_tokenizer(config)
    if tokenizer and not config.data.mock_data:
        raise FlagError(
            f"{tokenizer} names a tokenizer, but no flag names data; give --data-path, or --mock-data to train on generated tokens."
        )


def _with_gpt2_tokenizer(config: Config) -> Config:
    data = config.data
    if data.tokenizer_type is not None or data.vocab_file is None or data.merge_file is None:
        return config
    line = "--tokenizer-type is not given: GPT2BPETokenizer is used, to which --vocab-file and --merge-file belong"
    return config.with_values(tokenizer_type="GPT2BPETokenizer").with_notices(line)


def _mock_values(config: Config) -> dict[str, Any]:
    if _named_tokenizer(config):
        return {}
    return {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": MOCK_VOCAB_SIZE}


def _named_tokenizer(config: Config) -> str:
    """The flags that name the tokenizer of a text, with their values; empty if there are none."""
    if config.data.tokenizer_type == "NullTokenizer":
        return ""
    return " ".join(in_words(name, value) for name in ("tokenizer_type", *TOKENIZER_FILES) if (value := config.value_of(name)) is not None)


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
    lines = (in_words(name, value) for name, value in assumed.items())
    return replace(config.with_values(**assumed), assumptions=(headline, *lines))


def derive(config: Config, batches: BatchSchedule, ranks: RankCounts) -> Config:
    """The configuration in which no value is None that follows from other flags or from the world.

    batches, ranks: of the run in this world.
    """
    config = config.with_values(**_model_values(config), **_batch_values(config, batches), **_values_of_tokens(config))
    config = config.with_values(**_length_values(config, batches))
    config = config.with_values(
        **_decay_values(config),
        **_weight_decay_values(config, batches),
        ranks_per_node=ranks.ranks_per_node,
        sequence_parallel=config.distributed.sequence_parallel and ranks.tensor > 1,
        device=_or(config.plan.device, "cpu" if config.distributed.distributed_backend == "gloo" else "gpu"),
        profile_dir=_or(config.profiling.profile_dir, config.logging.tensorboard_dir),
        zero_hpz_partition_size=1 if ranks.of_island.data == 1 else config.zero.zero_hpz_partition_size,
        **_zero_values(config, batches),
        diloco_islands=ranks.islands,
    )
    return config.with_values(**_diloco_values(config, batches))


def _or(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _model_values(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "position_embedding_type": _position_embedding_type(config),
        "num_query_groups": _or(model.num_query_groups, 1 if model.group_query_attention else model.num_attention_heads),
        "ffn_hidden_size": _ffn_hidden_size(model),
        "kv_channels": _or(model.kv_channels, model.hidden_size // model.num_attention_heads),
        "max_position_embeddings": _or(model.max_position_embeddings, model.seq_length),
        **_recompute_values(model),
    }


def _recompute_values(model: ModelConfig) -> dict[str, Any]:
    if model.recompute_granularity != "full":
        return {}
    return {
        "recompute_method": _or(model.recompute_method, "uniform"),
        "recompute_num_layers": _or(model.recompute_num_layers, 1),
    }


def _zero_values(config: Config, batches: BatchSchedule) -> dict[str, Any]:
    zero = config.zero
    inter_bits, intra_bits = (3, 8) if zero.zero_quantized_gradients_code == "gaussian" else (4, 4)
    has_several_microbatches = batches.full_size > batches.grain
    sums_inside = zero.zeropp == "lean" and zero.zero_stage >= 2 and has_several_microbatches
    return {
        "zero_quantized_gradients_inter_bits": _or(zero.zero_quantized_gradients_inter_bits, inter_bits),
        "zero_quantized_gradients_intra_bits": _or(zero.zero_quantized_gradients_intra_bits, intra_bits),
        "zero_gradients_between_microbatches": _or(zero.zero_gradients_between_microbatches, "secondary" if sums_inside else "primary"),
    }


def _diloco_values(config: Config, batches: BatchSchedule) -> dict[str, Any]:
    diloco = config.diloco
    period = diloco.diloco_sync_period
    if period is None:
        return {}
    return {
        "diloco_start_iteration": _or(diloco.diloco_start_iteration, warmup_iterations(config, batches)),
        "diloco_outer_lr": _or(diloco.diloco_outer_lr, default_outer_lr(period)),
    }


def default_outer_lr(period: int) -> float:
    """The learning rate of outer steps that are `period` inner steps apart."""
    return min(LARGEST_OUTER_LR, period * OUTER_LR_OF_AN_ITERATION)


def warmup_iterations(config: Config, batches: BatchSchedule, consumed_samples: int = 0) -> int:
    """The iterations after so many samples until the warmup of the learning rate is over, in a resolved configuration."""
    warmup = horizons(config.optimizer, config.training, config.sample_lengths).warmup_samples
    whole = batches.iterations_within(int(warmup), consumed_samples)
    return whole + (batches.samples_after(whole, consumed_samples) < warmup)


def _position_embedding_type(config: Config) -> str:
    model = config.model
    return "none" if model.no_position_embedding and "position_embedding_type" not in config.given else model.position_embedding_type


def _ffn_hidden_size(model: ModelConfig) -> int:
    """As given, or 4 H. With a gate, whose matrix is a third one: two thirds of 4 H, rounded down to a multiple of 64, as in Megatron."""
    hidden = model.hidden_size
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    if not model.swiglu:
        return 4 * hidden
    width = int(4 * hidden * 2 / 3 / 64) * 64
    if width == 0:
        raise FlagError(
            f"--swiglu with --hidden-size {hidden} leaves the feed-forward layer no width, because two thirds of 4 x {hidden} are rounded "
            "down to a multiple of 64; give --ffn-hidden-size."
        )
    return width


def _batch_values(config: Config, batches: BatchSchedule) -> dict[str, Any]:
    training = config.training
    micro_batch_size = _or(training.micro_batch_size, 1)
    return {
        "micro_batch_size": micro_batch_size,
        "global_batch_size": batches.stages[-1].asked_size,
        "eval_micro_batch_size": _or(training.eval_micro_batch_size, micro_batch_size),
        "eval_global_batch_size": _or(training.eval_global_batch_size, batches.full_size),
    }


def _values_of_tokens(config: Config) -> dict[str, Any]:
    """Lengths that are given in tokens, converted to samples."""
    training, optimizer, lengths = config.training, config.optimizer, config.sample_lengths
    values: dict[str, Any] = {}
    decay_tokens = optimizer.lr_decay_tokens
    if training.train_tokens is not None and training.train_iters is None:
        samples = lengths.samples_for(training.train_tokens)
        if training.train_samples is not None and training.train_samples < samples:
            values["train_tokens"] = None
        else:
            values["train_samples"] = samples
            decay_tokens = _or(decay_tokens, training.train_tokens) if optimizer.lr_decay_samples is None else None
    if decay_tokens is not None:
        values |= {"lr_decay_tokens": decay_tokens, "lr_decay_samples": lengths.samples_for(decay_tokens)}
    if optimizer.lr_warmup_tokens:
        values["lr_warmup_samples"] = lengths.samples_for(optimizer.lr_warmup_tokens)
    return values


def _length_values(config: Config, batches: BatchSchedule) -> dict[str, Any]:
    training = config.training
    if training.train_samples is None:
        return _shorter_length(config, batches)
    train_iters = batches.iterations_within(training.train_samples)
    if train_iters == 0:
        smallest = batches.batch_size(0)
        raise FlagError(f"--train-samples {training.train_samples} is less than one global batch of {smallest}; choose {smallest} or more.")
    return {"train_iters": train_iters}


def _shorter_length(config: Config, batches: BatchSchedule) -> dict[str, Any]:
    """--train-iters as far as --train-tokens go. The decay still ends where --train-iters end, as in Megatron-DeepSpeed."""
    training = config.training
    if training.train_tokens is None:
        return {}
    within = batches.iterations_within(config.sample_lengths.samples_for(training.train_tokens))
    if within == 0:
        raise FlagError(
            f"--train-tokens {training.train_tokens} is less than one global batch; leave it out, --train-iters says the length."
        )
    return {
        "train_iters": min(training.train_iters, within),
        "lr_decay_iters": _or(config.optimizer.lr_decay_iters, training.train_iters),
    }


def _decay_values(config: Config) -> dict[str, Any]:
    if config.training.train_samples is None:
        return {"lr_decay_iters": _or(config.optimizer.lr_decay_iters, config.training.train_iters)}
    return {"lr_decay_samples": _or(config.optimizer.lr_decay_samples, config.training.train_samples)}


def _weight_decay_values(config: Config, batches: BatchSchedule) -> dict[str, Any]:
    optimizer = config.optimizer
    length = length_in_samples(config.training, batches)
    return {
        "start_weight_decay": _or(optimizer.start_weight_decay, optimizer.weight_decay),
        "end_weight_decay": _or(optimizer.end_weight_decay, optimizer.weight_decay),
        "weight_decay_incr_samples": _or(optimizer.weight_decay_incr_samples, length),
    }
