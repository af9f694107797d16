"""Hugging Face's layouts of Llama (2 and 3), Mistral, Qwen2 and Qwen3: names and shapes of the weights, and the matching config.json.

They differ in what attention has besides its weights: nothing, or biases everywhere (Llama); nothing (Mistral); biases of q, k and v
(Qwen2); norms of every query and key head (Qwen3). Beside our layout (K groups of M = N / K query heads of D channels):

    here                                       Hugging Face
    embedding.word.weight [padded V, H]        model.embed_tokens.weight [V, H]
    attention.qkv.weight [K (M + 2) D, H]      self_attn.q_proj [N D, H], k_proj [K D, H], v_proj [K D, H]: all heads of one kind
    mlp.up.weight [2 F, H]                     mlp.gate_proj [F, H] and mlp.up_proj [F, H]
    final.head.weight, if untied               lm_head.weight

Both layouts rotate channel d with channel d + D / 2, so rows keep their order within a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.hf.rules import HEAD, Boundaries, HfTensor, TensorRule, norm, one_tensor, vocabulary
from megatron_zpp.config.schema import ModelConfig

PREFIX = "model."
IGNORED_BUFFERS = (".rotary_emb.inv_freq",)  # old versions saved the frequencies
DEFAULT_ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Family:
    """One of the kinds of model. architecture: the class of transformers that loads it.

    divides_width: whether this class refuses a number of heads that does not divide the hidden size. may_have_bias: whether config.json may
    ask for biases. sliding_window: of attention if config.json does not have one.
    """

    model_type: str
    architecture: str
    divides_width: bool = False
    has_qkv_bias: bool = False
    has_head_norms: bool = False
    may_have_bias: bool = False
    sliding_window: int | None = None

    def unsupported_flags(self, model: ModelConfig) -> list[str]:
        """The flags of the model that the layout cannot express."""
        is_scaled_twice = model.use_rope_scaling and model.rotary_seq_len_interpolation_factor != 1
        heads = f"--num-attention-heads {model.num_attention_heads} that does not divide --hidden-size {model.hidden_size}"
        conditions = {
            heads: self.divides_width and model.hidden_size % model.num_attention_heads != 0,
            f"--position-embedding-type {model.position_embedding_type}": model.position_embedding_type != "rope",
            f"--rotary-percent {model.rotary_percent}": model.rotary_percent != 1,
            "--rotary-interleaved": model.rotary_interleaved,
            "--use-rope-scaling with --rotary-seq-len-interpolation-factor": is_scaled_twice,
            f"--normalization {model.normalization}": model.normalization != "RMSNorm",
            "GELU without --swiglu": not model.swiglu and not model.squared_relu,
            "--squared-relu": model.squared_relu,
            "--qk-layernorm": model.qk_layernorm and not self.has_head_norms,
            "attention without --qk-layernorm": self.has_head_norms and not model.qk_layernorm,
            **self._unsupported_biases(model),
        }
        return [flags for flags, is_unsupported in conditions.items() if is_unsupported]

    def _unsupported_biases(self, model: ModelConfig) -> dict[str, bool]:
        if self.has_qkv_bias:
            return {
                "biases without --disable-bias-linear": model.has_linear_bias,
                "--disable-bias-linear without --add-qkv-bias": not model.has_qkv_bias,
            }
        return {
            "--add-qkv-bias": model.has_qkv_bias and not model.has_linear_bias,
            "biases without --disable-bias-linear": self.has_head_norms and model.has_linear_bias,
        }

    def config_json(self, model: ModelConfig, vocab_size: int, boundaries: Boundaries) -> dict[str, Any]:
        """Hugging Face's config.json, except for the dtype of the weights."""
        members = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.key_value_heads,
            "head_dim": model.kv_channels,
            "max_position_embeddings": max(model.max_position_embeddings, model.seq_length),  # rotation has no limit here
            "rope_theta": model.rotary_base,
            "rope_scaling": _rope_scaling(model),
            "vocab_size": vocab_size,
            "rms_norm_eps": model.norm_epsilon,
            "attention_dropout": model.attention_dropout,
            "initializer_range": model.init_method_std,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            **boundaries.members(),
        }
        if self.has_qkv_bias:
            return members
        return members | {"attention_bias": model.has_linear_bias} | ({} if self.has_head_norms else {"mlp_bias": model.has_linear_bias})

    def model_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """Our configuration for the model that Hugging Face's config.json describes.

        Raises ValueError, with the reason, for a model that ours cannot compute, and KeyError for a missing entry.
        """
        self._check_function(config)
        heads, positions = config["num_attention_heads"], config["max_position_embeddings"]
        return ModelConfig(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_attention_heads=heads,
            ffn_hidden_size=config["intermediate_size"],
            kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            seq_length=positions,
            position_embedding_type="rope",
            max_position_embeddings=positions,
            **_rotary_fields(config),
            normalization="RMSNorm",
            norm_epsilon=config["rms_norm_eps"],
            qk_layernorm=self.has_head_norms,
            swiglu=True,
            disable_bias_linear=self.has_qkv_bias or not config.get("attention_bias", False),
            add_qkv_bias=self.has_qkv_bias,
            untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
            init_method_std=config.get("initializer_range", 0.02),
            attention_dropout=config.get("attention_dropout", 0.0),
            hidden_dropout=0.0,
        )

    def _check_function(self, config: Mapping[str, Any]) -> None:
        has_bias = self.may_have_bias and config.get("attention_bias", False)
        expected = {"hidden_act": "silu", "use_sliding_window": False, "partial_rotary_factor": 1.0, "mlp_bias": has_bias}
        expected |= {"attention_bias": has_bias}
        for key, value in expected.items():
            if config.get(key, value) not in (value, None):
                raise ValueError(f"config.json has {key} {config[key]}, which this model does not compute; only {value} can be converted.")
        window, positions = config.get("sliding_window", self.sliding_window), config["max_position_embeddings"]
        if self.sliding_window is not None and window is not None and window < positions:
            raise ValueError(
                f"config.json has {positions} positions and sliding_window {window}, which this model does not compute; only null, or a "
                "window of all positions, can be converted."
            )


LLAMA = Family("llama", "LlamaForCausalLM", divides_width=True, may_have_bias=True)
MISTRAL = Family("mistral", "MistralForCausalLM", sliding_window=4096)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", has_qkv_bias=True)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", has_head_norms=True)


def rules(model: ModelConfig, vocab_size: int, padded_vocab_size: int) -> Iterator[TensorRule]:
    """The rules for every parameter of a model without unsupported flags. vocab_size: rows of the embedding in Hugging Face's files."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    yield vocabulary("embedding.word.weight", f"{PREFIX}embed_tokens.weight", (vocab_size, hidden), padded_vocab_size)
    for index in range(model.num_layers):
        block, hf_block = f"blocks.{index}", f"{PREFIX}layers.{index}"
        yield from norm(model, f"{block}.attention_norm", f"{hf_block}.input_layernorm", hidden)
        yield from _attention(model, f"{block}.attention", f"{hf_block}.self_attn")
        yield from norm(model, f"{block}.mlp_norm", f"{hf_block}.post_attention_layernorm", hidden)
        yield from _gate_and_value(model, f"{block}.mlp.up", f"{hf_block}.mlp")
        yield from _linear(f"{block}.mlp.down", f"{hf_block}.mlp.down_proj", (hidden, ffn), model.has_linear_bias)
    yield from norm(model, "final.norm", f"{PREFIX}norm", hidden)
    if model.untie_embeddings_and_output_weights:
        yield vocabulary("final.head.weight", HEAD, (vocab_size, hidden), padded_vocab_size)


def _attention(model: ModelConfig, name: str, hf_name: str) -> Iterator[TensorRule]:
    widths = {"q_proj": model.heads_width} | dict.fromkeys(("k_proj", "v_proj"), model.key_value_heads * model.kv_channels)
    tails: dict[str, tuple[int, ...]] = {"weight": (model.hidden_size,)} | ({"bias": ()} if model.has_qkv_bias else {})
    for part, tail in tails.items():
        tensors = tuple(HfTensor(f"{hf_name}.{projection}.{part}", (width, *tail)) for projection, width in widths.items())
        yield TensorRule(f"{name}.qkv.{part}", tensors, partial(_by_kind, model), partial(_by_group, model))
    if model.qk_layernorm:
        yield from norm(model, f"{name}.query_norm", f"{hf_name}.q_norm", model.kv_channels)
        yield from norm(model, f"{name}.key_norm", f"{hf_name}.k_norm", model.kv_channels)
    yield from _linear(f"{name}.projection", f"{hf_name}.o_proj", (model.hidden_size, model.heads_width), model.has_linear_bias)


def _gate_and_value(model: ModelConfig, name: str, hf_name: str) -> Iterator[TensorRule]:
    ffn = model.ffn_hidden_size
    tails: dict[str, tuple[int, ...]] = {"weight": (model.hidden_size,)} | ({"bias": ()} if model.has_linear_bias else {})
    for part, tail in tails.items():
        tensors = tuple(HfTensor(f"{hf_name}.{projection}.{part}", (ffn, *tail)) for projection in ("gate_proj", "up_proj"))
        yield TensorRule(f"{name}.{part}", tensors, lambda rows: rows.split(ffn), lambda parts: torch.cat(tuple(parts)))


def _linear(name: str, hf_name: str, shape: tuple[int, int], has_bias: bool) -> Iterator[TensorRule]:
    yield one_tensor(f"{name}.weight", f"{hf_name}.weight", shape)
    if has_bias:
        yield one_tensor(f"{name}.bias", f"{hf_name}.bias", shape[:1])


def _by_kind(model: ModelConfig, rows: Tensor) -> list[Tensor]:
    """From rows ordered by group: the rows of all query heads, of all key heads, and of all value heads."""
    queries = model.num_attention_heads // model.key_value_heads
    groups = rows.unflatten(0, (model.key_value_heads, queries + 2, model.kv_channels))
    return [part.flatten(0, 2) for part in groups.split((queries, 1, 1), dim=1)]


def _by_group(model: ModelConfig, kinds: Sequence[Tensor]) -> Tensor:
    groups = [rows.unflatten(0, (model.key_value_heads, -1, model.kv_channels)) for rows in kinds]
    return torch.cat(groups, dim=1).flatten(0, 2)


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.use_rope_scaling:
        return {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_scaling_low_freq_factor,
            "high_freq_factor": model.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings,
        }
    if model.rotary_seq_len_interpolation_factor != 1:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    return None


def _rotary_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig for rotary positions. Reads both forms: rope_theta and rope_scaling, or rope_parameters with both.

    Raises ValueError for two forms of scaling: of these, transformers follows rope_scaling alone, without the base that the other has.
    """
    if config.get("rope_parameters") and config.get("rope_scaling"):
        raise ValueError("config.json has rope_parameters and rope_scaling; only one of them can be converted, so remove the other.")
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fields = {"rotary_base": float(scaling.get("rope_theta") or config.get("rope_theta") or DEFAULT_ROTARY_BASE)}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return fields
    if kind == "linear":
        return fields | {"rotary_seq_len_interpolation_factor": scaling["factor"]}
    if kind == "llama3":
        return fields | {
            "use_rope_scaling": True,
            "rope_scaling_factor": scaling["factor"],
            "rope_scaling_low_freq_factor": scaling["low_freq_factor"],
            "rope_scaling_high_freq_factor": scaling["high_freq_factor"],
            "rope_scaling_original_max_position_embeddings": scaling["original_max_position_embeddings"],
        }
    raise ValueError(f"config.json has rope_type {kind}, which this model does not compute; default, linear and llama3 can be converted.")
