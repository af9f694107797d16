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

from torch import Tensor

from megatron_zpp.checkpoint.hf.rules import HEAD, Boundaries, TensorRule, norm, one_tensor, vocabulary
from megatron_zpp.config.schema import ModelConfig

PREFIX = "transformer."
EXACT_GELU = "gelu"
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh")  # two names for one function
IGNORED_BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks that old versions saved
CHANGES_THE_FUNCTION: dict[str, Any] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


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
    yield vocabulary("embedding.word.weight", f"{PREFIX}wte.weight", (vocab_size, hidden), padded_vocab_size)
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


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Our configuration for the model that Hugging Face's config.json describes.

    Raises ValueError, with the reason, for a GPT-2 that our model cannot compute, and KeyError for a missing entry.
    """
    activation = config.get("activation_function", TANH_GELUS[0])
    if activation not in (EXACT_GELU, *TANH_GELUS):
        raise ValueError(f"config.json has activation_function {activation}; only GELU, {EXACT_GELU} or {TANH_GELUS[0]}, can be converted.")
    for key, value in CHANGES_THE_FUNCTION.items():
        if config.get(key, value) != value:
            raise ValueError(f"config.json has {key} {config[key]}, which this model does not compute; only {value} can be converted.")
    hidden, positions = config["n_embd"], config["n_positions"]
    return ModelConfig(
        num_layers=config["n_layer"],
        hidden_size=hidden,
        no_bias_gelu_fusion=activation == EXACT_GELU,
        num_attention_heads=config["n_head"],
        ffn_hidden_size=config.get("n_inner") or 4 * hidden,
        kv_channels=hidden // config["n_head"],
        num_query_groups=config["n_head"],
        seq_length=positions,
        max_position_embeddings=positions,
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", True),
        init_method_std=config.get("initializer_range", 0.02),
        attention_dropout=config.get("attn_pdrop", 0.1),
        hidden_dropout=config.get("resid_pdrop", 0.1),
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
