"""The part of a tensor rank in a parameter, by plain slicing in the order of rows that model/shapes.py documents; and models to slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.small_gpt import LLAMA, small_config
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.division import Gradient

VOCAB = 64
SIZES: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 8, "num_query_groups": 8, "kv_channels": 6}
SHARED_HEADS = LLAMA | SIZES | {"num_query_groups": 2}
# Up to 8 tensor ranks share each of them.
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": SIZES,
    "GPT-2 untied, no positions": SIZES | {"untie_embeddings_and_output_weights": True, "position_embedding_type": "none"},
    "Llama 3": SHARED_HEADS,
    "Llama 3, one key per head": LLAMA | SIZES,
    "Qwen2": SHARED_HEADS | {"add_qkv_bias": True, "num_query_groups": 4},
    "Qwen3, tied": SHARED_HEADS | {"qk_layernorm": True, "untie_embeddings_and_output_weights": False},
    # Without rotation, the bias of a key's norm changes no attention.
    "one key head, every bias": SIZES | {"num_query_groups": 1, "qk_layernorm": True, "swiglu": True, "position_embedding_type": "rope"},
}


def config_of(model: str, **changes: Any) -> ModelConfig:
    return small_config(**MODELS[model] | changes)


def part_of(name: str, whole: Tensor, config: ModelConfig, ranks: int, rank: int) -> Tensor:
    """What tensor rank `rank` of `ranks` has of the parameter."""
    module, kind = name.rsplit(".", 1)
    if module.endswith("attention.qkv"):
        return _qkv_part(whole, config, ranks, rank)
    if module.endswith("mlp.up") and config.swiglu:
        gate, value = whole.chunk(2)
        return torch.cat([gate.chunk(ranks)[rank], value.chunk(ranks)[rank]])
    if module.endswith(("mlp.up", "embedding.word", "embedding.position", "final.head")):
        return whole.chunk(ranks)[rank]
    if module.endswith(("attention.projection", "mlp.down")) and kind == "weight":
        return whole.chunk(ranks, dim=1)[rank]
    return whole


def _qkv_part(whole: Tensor, config: ModelConfig, ranks: int, rank: int) -> Tensor:
    """The queries of the rank's heads, each group's followed by its key and its value."""
    heads, groups = config.num_attention_heads, config.key_value_heads
    queries = heads // groups
    row_of = whole.unflatten(0, (groups, queries + 2, config.kv_channels))
    own = range(rank * heads // ranks, (rank + 1) * heads // ranks)
    rows = []
    for group in sorted({head // queries for head in own}):
        rows += [row_of[group, head % queries] for head in own if head // queries == group]
        rows += [row_of[group, queries], row_of[group, queries + 1]]
    return torch.cat(rows)


# Whether every holder, any holder, and the sum over the holders has the whole gradient.
HOLDS = {Gradient.WHOLE: (True, True, False), Gradient.PARTIAL: (False, False, True)}


def check_gradients(
    config: ModelConfig,
    whole: Mapping[str, Tensor],
    of_ranks: Sequence[Mapping[str, Tensor]],
    *,
    sequence_parallel: bool,
    tolerances: Mapping[str, float],
) -> None:
    """Asserts that the ranks' gradients, by parameter, are those of the whole model, as model/divisions.py says for shared elements.

    tolerances: by parameter, as a share of the largest value of its gradient.
    """
    ranks = len(of_ranks)
    for rank in range(ranks):
        shape = ModelShape(config, VOCAB, ranks, rank, sequence_parallel)
        names = {spec.name for unit in shape.unit_specs() for spec in unit.params}
        assert set(of_ranks[rank]) == names == set(whole)
        for spec in (spec for unit in shape.unit_specs() for spec in unit.params):
            allowed = tolerances[spec.name] * float(whole[spec.name].abs().max())
            expected = part_of(spec.name, whole[spec.name], config, ranks, rank).flatten()

            def is_close(found: Tensor, values: Tensor, allowed: float = allowed) -> bool:
                return values.numel() == 0 or bool((found - values).abs().max() <= allowed)

            own = of_ranks[rank][spec.name].flatten()
            is_alone = torch.ones(expected.numel(), dtype=torch.bool)
            for shared in spec.shared:
                elements = slice(shared.start, shared.stop)
                is_alone[elements] = False
                holders = [of_ranks[holder][spec.name].flatten()[elements] for holder in shared.holders]
                is_whole = [is_close(holder, expected[elements]) for holder in holders]
                adds_up = is_close(torch.stack(holders).sum(0), expected[elements])
                assert (all(is_whole), any(is_whole), adds_up) == HOLDS[shared.gradient], spec.name
            assert is_close(own[is_alone], expected[is_alone]), spec.name
