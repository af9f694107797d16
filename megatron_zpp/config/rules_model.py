"""Rules between the flags of the model."""

from __future__ import annotations

from megatron_zpp.config.flag import FlagError, any_of, divisors, in_words, nearest
from megatron_zpp.config.options import check_one_of
from megatron_zpp.config.schema import Config


def check_given(config: Config) -> None:
    """Raises FlagError for the first rule that the flags break as they were given."""
    check_heads_divide_hidden_size(config)
    check_recomputed_blocks(config)
    check_one_of(config, "swiglu", "squared_relu")
    check_one_kind_of_positions(config)
    check_norms(config)
    check_vocabulary_padding(config)


def check_resolved(config: Config) -> None:
    """Raises FlagError for the first rule that the filled-in values break."""
    check_positions(config)
    check_query_groups(config)
    check_rotary_channels(config)
    check_rope_scaling(config)


def check_heads_divide_hidden_size(config: Config) -> None:
    model = config.model
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads != 0:
        raise FlagError(
            f"--num-attention-heads {model.num_attention_heads} does not divide --hidden-size {model.hidden_size}; "
            f"choose {any_of(nearest(divisors(model.hidden_size), model.num_attention_heads))}."
        )


def check_recomputed_blocks(config: Config) -> None:
    model = config.model
    if model.recompute_num_layers is not None and model.recompute_num_layers > model.num_layers:
        raise FlagError(
            f"--recompute-num-layers {model.recompute_num_layers} is more than --num-layers {model.num_layers}; "
            f"choose {model.num_layers} or less."
        )


def check_one_kind_of_positions(config: Config) -> None:
    model = config.model
    if model.no_position_embedding and "position_embedding_type" in config.given and model.learns_positions:
        raise FlagError("--no-position-embedding and --position-embedding-type learned_absolute exclude each other; give one of them.")


def check_norms(config: Config) -> None:
    if config.model.apply_layernorm_1p and config.model.norm_backend == "apex":
        raise FlagError("--apply-layernorm-1p is not available with --norm-backend apex; choose --norm-backend torch.")


def check_vocabulary_padding(config: Config) -> None:
    rows, multiple = config.model.padded_vocab_size, config.model.make_vocab_size_divisible_by
    if rows is not None and rows % multiple != 0 and "make_vocab_size_divisible_by" in config.given:
        raise FlagError(
            f"--padded-vocab-size {rows} is not a multiple of --make-vocab-size-divisible-by {multiple}; leave one of them out."
        )


def check_positions(config: Config) -> None:
    model = config.model
    if model.learns_positions and model.max_position_embeddings < model.seq_length:
        raise FlagError(
            f"--max-position-embeddings {model.max_position_embeddings} is below --seq-length {model.seq_length}; "
            f"choose {model.seq_length} or more."
        )


def check_query_groups(config: Config) -> None:
    groups, heads = config.model.num_query_groups, config.model.num_attention_heads
    if heads % groups != 0:
        raise FlagError(
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; choose {any_of(nearest(divisors(heads), groups))}."
        )


def check_rotary_channels(config: Config) -> None:
    """Rotary positions rotate channels in pairs, so their number is even."""
    model = config.model
    rotating, channels = model.rotary_channels, model.kv_channels
    if model.position_embedding_type != "rope" or (rotating > 0 and rotating % 2 == 0):
        return
    even = [number for number in (rotating - 1, rotating + 1, rotating + 2) if number % 2 == 0 and 0 < number <= channels]
    choices = [f"--rotary-percent {number / channels:g}" for number in even if int(channels * float(f"{number / channels:g}")) == number]
    other_channels = "an even --kv-channels" if model.rotary_percent == 1 else "another --kv-channels"
    raise FlagError(
        f"--rotary-percent {model.rotary_percent} rotates {rotating} of a head's {channels} channels, which are not pairs; "
        f"choose {any_of([*choices, other_channels])}."
    )


def check_rope_scaling(config: Config) -> None:
    model = config.model
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if model.use_rope_scaling and high <= low:
        raise FlagError(
            f"--rope-scaling-high-freq-factor {high} is not above --rope-scaling-low-freq-factor {low}; choose a value above {low}."
        )


def surprising_defaults(config: Config) -> list[str]:
    """One line if Megatron's default dropout applies to a kind of model that is trained without."""
    model = config.model
    is_recent = model.position_embedding_type == "rope" or model.normalization == "RMSNorm" or model.swiglu
    names = [name for name in ("attention_dropout", "hidden_dropout") if name not in config.given and config.value_of(name) > 0]
    if not is_recent or not names:
        return []
    values = " and ".join(in_words(name, config.value_of(name)) for name in names)
    return [f"{values}: Megatron's default, and not given; models of the Llama kind train with 0"]
