"""Hugging Face's layout of GPT-2: names, shapes and order of the weights, and the matching config.json.

The layouts differ as follows (N heads of D channels, H = N D, V the vocabulary without its padding):

    here                                       Hugging Face
    embedding.word.weight [padded V, H]        wte.weight [V, H]
    attention.qkv.weight [N 3 D, H]            attn.c_attn.weight [H, 3 N D]: transposed, all heads of q, then of k, then of v
    other weights of linear layers [out, in]   [in, out]
    final.head.weight, if untied               lm_head.weight
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.hf.rules import HEAD, Boundaries, Buffer, TensorRule, norm, one_tensor, vocabulary
from megatron_zpp.checkpoint.hf.settings import WITHOUT_CHANGE, require, require_full_attention, setting
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.system.outside import Members

PREFIX = "transformer."
EMBEDDING = f"{PREFIX}wte.weight"
EXACT_GELU = "gelu"
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh")  # two names for one function
# Fields of ModelConfig, each with its key in config.json.
FIELDS = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "ffn_hidden_size": "n_inner",
    "seq_length": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
    "init_method_std": "initializer_range",
    "attention_dropout": "attn_pdrop",
    "hidden_dropout": "resid_pdrop",
}
# Other keys for the same settings. transformers follows them rather than the first ones.
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
DEFAULTS: Mapping[str, Any] = {
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "activation_function": TANH_GELUS[0],
    "tie_word_embeddings": True,
}
# Settings that change what weights compute, with the values that this model computes.
FUNCTION: Mapping[str, tuple[Any, ...]] = {
    "activation_function": (EXACT_GELU, *TANH_GELUS),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False, True),  # the same function, in fp32
    "add_cross_attention": (False,),
}
MASKED_SCORE = -1e4  # exp of it is 0


def _is_causal_mask(_: ModelConfig, mask: Tensor) -> bool:
    """Whether it is [1, 1, P, P] with ones up to the diagonal and zeros above it."""
    positions = mask.shape[-1] if mask.dim() else 0
    return mask.shape == (1, 1, positions, positions) and bool((mask == torch.ones(mask.shape, dtype=torch.bool).tril()).all())


BUFFERS = (
    Buffer(".attn.bias", "the mask of causal attention", _is_causal_mask),
    Buffer(
        ".attn.masked_bias",
        f"a number that is at most {MASKED_SCORE:g}",
        lambda _, score: score.numel() == 1 and score.item() <= MASKED_SCORE,
    ),
)


def unsupported_flags(model: ModelConfig) -> list[str]:
    """The flags of the model that the layout cannot express."""
    heads = f"--num-attention-heads {model.num_attention_heads} of --kv-channels {model.kv_channels}"
    conditions = {
        f"{heads} beside --hidden-size {model.hidden_size}": model.heads_width != model.hidden_size,
        f"--num-query-groups {model.num_query_groups}": model.key_value_heads != model.num_attention_heads,
        f"--position-embedding-type {model.position_embedding_type}": not model.learns_positions,
        f"--normalization {model.normalization}": model.normalization != "LayerNorm",
        "--qk-layernorm": model.qk_layernorm,
        "--swiglu": model.swiglu,
        "--squared-relu": model.squared_relu,
        "--disable-bias-linear": model.disable_bias_linear,
    }
    return [flags for flags, is_unsupported in conditions.items() if is_unsupported]


def rules(model: ModelConfig, vocab_size: int, padded_vocab_size: int) -> Iterator[TensorRule]:
    """The rules for every parameter of a model without unsupported flags. vocab_size: rows of the embedding in Hugging Face's files."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    yield vocabulary("embedding.word.weight", EMBEDDING, (vocab_size, hidden), padded_vocab_size)
    yield one_tensor("embedding.position.weight", f"{PREFIX}wpe.weight", (model.max_position_embeddings, hidden))
    for index in range(model.num_layers):
        block, hf_block = f"blocks.{index}", f"{PREFIX}h.{index}"
        yield from norm(model, f"{block}.attention_norm", f"{hf_block}.ln_1", hidden)
        yield from _qkv(f"{block}.attention.qkv", f"{hf_block}.attn.c_attn", model)
        yield from _linear(f"{block}.attention.projection", f"{hf_block}.attn.c_proj", hidden, hidden)
        yield from norm(model, f"{block}.mlp_norm", f"{hf_block}.ln_2", hidden)
        yield from _linear(f"{block}.mlp.up", f"{hf_block}.mlp.c_fc", hidden, ffn)
        yield from _linear(f"{block}.mlp.down", f"{hf_block}.mlp.c_proj", ffn, hidden)
    yield from norm(model, "final.norm", f"{PREFIX}ln_f", hidden)
    if model.untie_embeddings_and_output_weights:
        yield vocabulary("final.head.weight", HEAD, (vocab_size, hidden), padded_vocab_size)


def config_json(model: ModelConfig, vocab_size: int, boundaries: Boundaries) -> dict[str, Any]:
    """Hugging Face's config.json, except for the dtype of the weights."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": EXACT_GELU if model.has_exact_gelu else TANH_GELUS[0],
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_position_embeddings,
        "vocab_size": vocab_size,
        "layer_norm_epsilon": model.norm_epsilon,
        "embd_pdrop": model.hidden_dropout,
        "resid_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        **boundaries.members(),
    }


def model_config(config: Members) -> ModelConfig:
    """Our configuration for the model that Hugging Face's config.json describes. A setting that is missing is transformers' default.

    Raises UserError, with the reason, for a setting that is no such setting, or that our GPT-2 cannot compute.
    """
    config = config.filled({**DEFAULTS, **{key: config.any(alias) for alias, key in ALIASES.items() if alias in config}})
    hidden, heads = setting(config, "n_embd", "hidden_size"), setting(config, "n_head", "num_attention_heads")
    if hidden % heads != 0:
        config.refuse("n_head", f"a divisor of n_embd {hidden}")
    config = config.filled({"n_inner": 4 * hidden}, {"n_inner": 4 * hidden})
    values = {field: setting(config, key, field) for field, key in FIELDS.items()}
    require(config, {**WITHOUT_CHANGE, **FUNCTION, **{alias: (config.any(key),) for alias, key in ALIASES.items()}})
    if config.number("embd_pdrop") != values["hidden_dropout"]:
        config.refuse("embd_pdrop", f"what resid_pdrop is, {values['hidden_dropout']}, because --hidden-dropout is both")
    require_full_attention(config, values["num_layers"])
    return ModelConfig(
        **values,
        no_bias_gelu_fusion=config.text("activation_function") == EXACT_GELU,
        kv_channels=hidden // heads,
        num_query_groups=heads,
        max_position_embeddings=values["seq_length"],
        untie_embeddings_and_output_weights=not config.switch("tie_word_embeddings"),
    )


def _linear(name: str, hf_name: str, width_in: int, width_out: int) -> Iterator[TensorRule]:
    yield one_tensor(f"{name}.weight", f"{hf_name}.weight", (width_in, width_out), Tensor.t, Tensor.t)
    yield one_tensor(f"{name}.bias", f"{hf_name}.bias", (width_out,))


def _qkv(name: str, hf_name: str, model: ModelConfig) -> Iterator[TensorRule]:
    heads, channels, hidden = model.num_attention_heads, model.kv_channels, model.hidden_size

    def by_kind(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (heads, 3, channels)).transpose(0, 1).flatten(0, 2)

    def by_head(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (3, heads, channels)).transpose(0, 1).flatten(0, 2)

    weight_shape = (hidden, 3 * heads * channels)
    yield one_tensor(
        f"{name}.weight", f"{hf_name}.weight", weight_shape, lambda rows: by_kind(rows).t(), lambda weight: by_head(weight.t())
    )
    yield one_tensor(f"{name}.bias", f"{hf_name}.bias", (3 * heads * channels,), by_kind, by_head)
