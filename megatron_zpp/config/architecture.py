"""Rules between the flags of the architecture, and which of them change nothing beside the others."""

from __future__ import annotations

from megatron_zpp.config.divisors import nearest_divisors
from megatron_zpp.config.flag import FlagError, any_of
from megatron_zpp.config.options import spelling_of
from megatron_zpp.config.schema import Config

ROPE_DETAILS = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling")
SCALING_DETAILS = (
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
)


def check_heads_divide_hidden_size(config: Config) -> None:
    model = config.model
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads != 0:
        raise FlagError(
            f"--num-attention-heads {model.num_attention_heads} does not divide --hidden-size {model.hidden_size}; "
            f"choose {any_of(nearest_divisors(model.hidden_size, model.num_attention_heads))}."
        )


def check_query_groups(config: Config) -> None:
    groups, heads = config.model.num_query_groups, config.model.num_attention_heads
    if heads % groups != 0:
        raise FlagError(
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; choose {any_of(nearest_divisors(heads, groups))}."
        )


def check_one_activation(config: Config) -> None:
    if config.model.swiglu and config.model.squared_relu:
        raise FlagError("--swiglu and --squared-relu exclude each other; give one of them.")


def check_norms(config: Config) -> None:
    if config.model.apply_layernorm_1p and config.model.norm_backend == "apex":
        raise FlagError("--apply-layernorm-1p is not available with --norm-backend apex; choose --norm-backend torch.")


def check_one_kind_of_positions(config: Config) -> None:
    model = config.model
    if model.no_position_embedding and "position_embedding_type" in config.given and model.learns_positions:
        raise FlagError("--no-position-embedding and --position-embedding-type learned_absolute exclude each other; give one of them.")


def check_positions(config: Config) -> None:
    model = config.model
    if model.learns_positions and model.max_position_embeddings < model.seq_length:
        raise FlagError(
            f"--max-position-embeddings {model.max_position_embeddings} is below --seq-length {model.seq_length}; "
            f"choose {model.seq_length} or more."
        )


def check_rotary_channels(config: Config) -> None:
    """Channels rotate in pairs."""
    model = config.model
    rotating, channels = model.rotary_channels, model.kv_channels
    if model.position_embedding_type != "rope" or (rotating > 0 and rotating % 2 == 0):
        return
    even = [number for number in (rotating - 1, rotating + 1, rotating + 2) if number % 2 == 0 and 0 < number <= channels]
    choices = [f"--rotary-percent {number / channels:g}" for number in even if int(channels * float(f"{number / channels:g}")) == number]
    raise FlagError(
        f"--rotary-percent {model.rotary_percent} rotates {rotating} of a head's {channels} channels, which are no pairs; "
        f"choose {any_of([*choices, 'an even --kv-channels'])}."
    )


def check_rope_scaling(config: Config) -> None:
    model = config.model
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if model.use_rope_scaling and high <= low:
        raise FlagError(
            f"--rope-scaling-high-freq-factor {high} is not above --rope-scaling-low-freq-factor {low}; choose a value above {low}."
        )


def surprising_defaults(config: Config) -> list[str]:
    """One line where Megatron's dropout comes to a model of the kind that trains without."""
    model = config.model
    is_recent = model.position_embedding_type == "rope" or model.normalization == "RMSNorm" or model.swiglu
    names = [name for name in ("attention_dropout", "hidden_dropout") if name not in config.given and config.value_of(name) > 0]
    if not is_recent or not names:
        return []
    values = " and ".join(f"{spelling_of(name)} {config.value_of(name)}" for name in names)
    return [f"{values}: Megatron's default, and not given; models of the Llama kind train with 0"]


def architecture_flags_without_effect(config: Config) -> dict[str, str]:
    """Fields that change nothing in this architecture, and why; given or not."""
    model = config.model
    reasons: dict[str, str] = {}
    if not model.use_rope_scaling:
        reasons |= dict.fromkeys(SCALING_DETAILS, "without --use-rope-scaling")
    if model.position_embedding_type != "rope":
        reasons |= dict.fromkeys((*ROPE_DETAILS, *SCALING_DETAILS), "without --position-embedding-type rope")
    if model.position_embedding_type == "none":
        reasons["reset_position_ids"] = "with --position-embedding-type none"
    if model.has_linear_bias:
        reasons["add_qkv_bias"] = "without --disable-bias-linear, as every linear layer has a bias"
    return reasons
