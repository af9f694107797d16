"""The GPT-2 layout of Hugging Face: names, shapes and order of the same weights, and the config that goes with them.

Where the layouts differ (N heads of D channels, H = N D, V the vocabulary without its padding):

    ours                                       theirs
    embedding.word.weight [padded V, H]        wte.weight [V, H]
    attention.qkv.weight [N 3 D, H]            attn.c_attn.weight [H, 3 N D]: transposed, all heads of q, then of k, then of v
    other weights of linear layers [out, in]   [in, out]
    final.head.weight, if untied               lm_head.weight
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from megatron_zpp.checkpoint.hf.rules import HEAD, Boundaries, TensorRule, norm, vocabulary, whole
from megatron_zpp.config.schema import ModelConfig

PREFIX = "transformer."
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh")  # two names of the one function of our MLP
IGNORED_BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks that old versions saved
CHANGES_THE_FUNCTION: dict[str, Any] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def misfits(model: ModelConfig) -> list[str]:
    """What of the model has no place in the layout, by its flags."""
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
    return [flags for flags, is_there in conditions.items() if is_there]


def rules(model: ModelConfig, vocab_size: int, padded_vocab_size: int) -> Iterator[TensorRule]:
    """Every tensor of a model without misfits. vocab_size: rows of their embedding."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    yield vocabulary("embedding.word.weight", f"{PREFIX}wte.weight", (vocab_size, hidden), padded_vocab_size)
    yield whole("embedding.position.weight", f"{PREFIX}wpe.weight", (model.max_position_embeddings, hidden))
    for index in range(model.num_layers):
        ours, theirs = f"blocks.{index}", f"{PREFIX}h.{index}"
        yield from norm(model, f"{ours}.attention_norm", f"{theirs}.ln_1", hidden)
        yield from _qkv(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", model)
        yield from _linear(f"{ours}.attention.projection", f"{theirs}.attn.c_proj", hidden, hidden)
        yield from norm(model, f"{ours}.mlp_norm", f"{theirs}.ln_2", hidden)
        yield from _linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", hidden, ffn)
        yield from _linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", ffn, hidden)
    yield from norm(model, "final.norm", f"{PREFIX}ln_f", hidden)
    if model.untie_embeddings_and_output_weights:
        yield vocabulary("final.head.weight", HEAD, (vocab_size, hidden), padded_vocab_size)


def config_json(model: ModelConfig, vocab_size: int, boundaries: Boundaries) -> dict[str, Any]:
    """Their config.json, but for the dtype of the weights."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": TANH_GELUS[0],
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
    """Our configuration of the model that their config.json describes.

    Raises ValueError for a GPT-2 whose function ours cannot compute, with the reason, and KeyError for what the file lacks.
    """
    activation = config.get("activation_function", TANH_GELUS[0])
    if activation not in TANH_GELUS:
        raise ValueError(f"config.json has activation_function {activation}, and blocks here have the tanh form of GELU, {TANH_GELUS[0]}.")
    for key, value in CHANGES_THE_FUNCTION.items():
        if config.get(key, value) != value:
            raise ValueError(f"config.json has {key} {config[key]}, which this model does not compute; only {value} can be converted.")
    hidden, positions = config["n_embd"], config["n_positions"]
    return ModelConfig(
        num_layers=config["n_layer"],
        hidden_size=hidden,
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


def _linear(ours: str, theirs: str, width_in: int, width_out: int) -> Iterator[TensorRule]:
    yield whole(f"{ours}.weight", f"{theirs}.weight", (width_in, width_out), Tensor.t, Tensor.t)
    yield whole(f"{ours}.bias", f"{theirs}.bias", (width_out,))


def _qkv(ours: str, theirs: str, model: ModelConfig) -> Iterator[TensorRule]:
    heads, channels, hidden = model.num_attention_heads, model.kv_channels, model.hidden_size

    def by_kind(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (heads, 3, channels)).transpose(0, 1).flatten(0, 2)

    def by_head(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (3, heads, channels)).transpose(0, 1).flatten(0, 2)

    weight_shape = (hidden, 3 * heads * channels)
    yield whole(f"{ours}.weight", f"{theirs}.weight", weight_shape, lambda rows: by_kind(rows).t(), lambda tensor: by_head(tensor.t()))
    yield whole(f"{ours}.bias", f"{theirs}.bias", (3 * heads * channels,), by_kind, by_head)
