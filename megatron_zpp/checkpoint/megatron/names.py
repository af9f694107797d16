"""Megatron's names of the parameters, one table for all generations.

generation                        name of the rows of q, k and v of layer 3
Megatron core                     decoder.layers.3.self_attention.linear_qkv.weight
Megatron-LM before, DeepSpeed     language_model.encoder.layers.3.self_attention.query_key_value.weight
before 2022                       language_model.transformer.layers.3.attention.query_key_value.weight
core, torch_dist                  decoder.layers.self_attention.linear_qkv.weight [layers, rows, columns]
here                              blocks.3.attention.qkv.weight
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Beginnings of names outside the layers, and what stands for them here.
OUTSIDE_LAYERS = {
    "embedding.word_embeddings.": "embedding.word.",
    "embedding.position_embeddings.": "embedding.position.",
    "decoder.final_layernorm.": "final.norm.",
    "encoder.final_layernorm.": "final.norm.",
    "encoder.final_norm.": "final.norm.",
    "transformer.final_layernorm.": "final.norm.",
    "output_layer.": "final.head.",
    "word_embeddings_for_head.": "final.head.",
}
# Beginnings of names inside a layer. Transformer Engine counts a norm to the linear layer after it.
INSIDE_LAYERS = {
    "input_layernorm.": "attention_norm.",
    "input_norm.": "attention_norm.",
    "self_attention.linear_qkv.layer_norm_": "attention_norm.",
    "self_attention.linear_qkv.": "attention.qkv.",
    "self_attention.query_key_value.": "attention.qkv.",
    "attention.query_key_value.": "attention.qkv.",
    "self_attention.q_layernorm.": "attention.query_norm.",
    "self_attention.k_layernorm.": "attention.key_norm.",
    "self_attention.linear_proj.": "attention.projection.",
    "self_attention.dense.": "attention.projection.",
    "attention.dense.": "attention.projection.",
    "pre_mlp_layernorm.": "mlp_norm.",
    "post_attention_layernorm.": "mlp_norm.",
    "post_attention_norm.": "mlp_norm.",
    "mlp.linear_fc1.layer_norm_": "mlp_norm.",
    "mlp.linear_fc1.": "mlp.up.",
    "mlp.dense_h_to_4h.": "mlp.up.",
    "mlp.linear_fc2.": "mlp.down.",
    "mlp.dense_4h_to_h.": "mlp.down.",
}
FREQUENCIES = "rotary.frequencies"  # a buffer, which this model does not store
NO_WEIGHTS = re.compile(r"_extra_state|rotary_pos_emb|rotary_emb|inv_freq|masked_bias")
_WRAPPERS = re.compile(r"^(module\.|model\.|language_model\.)+")
_LAYER = re.compile(r"(?:decoder|encoder|transformer)\.layers\.(?:(?P<layer>0|[1-9][0-9]{0,5})\.)?(?P<rest>.*)")


def own_name(stored: str) -> str | None:
    """The name here of a tensor of Megatron, of one layer if it is of all; None if it has no counterpart in this model."""
    name = _WRAPPERS.sub("", stored)
    if name == "rotary_pos_emb.inv_freq":
        return FREQUENCIES
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _renamed(name, OUTSIDE_LAYERS)
    inside = _renamed(layer["rest"], INSIDE_LAYERS)
    return None if inside is None or layer["layer"] is None else f"blocks.{layer['layer']}.{inside}"


def is_of_all_layers(stored: str) -> bool:
    """Whether a tensor has a dimension for the layers: its name has none of their numbers."""
    layer = _LAYER.fullmatch(_WRAPPERS.sub("", stored))
    return layer is not None and layer["layer"] is None


def is_no_weight(stored: str) -> bool:
    """Whether a name is that of a buffer that is not compared, or of state of another library."""
    return own_name(stored) is None and NO_WEIGHTS.search(stored) is not None


def _renamed(name: str, table: Mapping[str, str]) -> str | None:
    """The name with another beginning, the longest in the table."""
    beginnings = [beginning for beginning in table if name.startswith(beginning)]
    if not beginnings:
        return None
    beginning = max(beginnings, key=len)
    end = name.removeprefix(beginning)
    return table[beginning] + end if end in ("weight", "bias") else None
