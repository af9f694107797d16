"""What the GPT tells the sharding engine of itself, from its configuration alone (no torch): for plans of runs that nobody starts yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec, Use

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class ModelShape:
    """The units and uses of `model.gpt.GPT` for the same configuration; its parameters have shapes and no values."""

    config: ModelConfig
    padded_vocab_size: int

    def unit_specs(self) -> tuple[UnitSpec, ...]:
        """Every parameter, once, in the units that gather together."""
        config, hidden = self.config, self.config.hidden_size
        units = {"embedding": _embedding(config, self.padded_vocab_size)}
        units |= {f"block.{index}": _block(config, f"blocks.{index}") for index in range(config.num_layers)}
        units["final_norm"] = _norm("final.norm", hidden)
        if config.untie_embeddings_and_output_weights:
            units["head"] = iter([("final.head.weight", (self.padded_vocab_size, hidden))])
        return tuple(
            UnitSpec(name, tuple(ParamSpec(*shape, _no_values, len(shape[1]) > 1) for shape in shapes)) for name, shapes in units.items()
        )

    def uses(self) -> tuple[Use, ...]:
        """The module calls of one forward in order, and the units each reads."""
        return uses_of(self.config)


def uses_of(config: ModelConfig) -> tuple[Use, ...]:
    """The module calls of one forward in order, and the units each reads; a tied embedding is read by the first and by the last."""
    output_unit = "head" if config.untie_embeddings_and_output_weights else "embedding"
    chunk_of = {block: number for number, chunk in enumerate(recomputed_chunks(config)) for block in chunk}
    return (
        Use("embedding", ("embedding",), needs_weights_in_backward=False),
        *(Use(f"blocks.{index}", (f"block.{index}",), True, chunk_of.get(index)) for index in range(config.num_layers)),
        Use("final", ("final_norm", output_unit), needs_weights_in_backward=True),
    )


def _embedding(config: ModelConfig, padded_vocab_size: int) -> Shapes:
    yield "embedding.word.weight", (padded_vocab_size, config.hidden_size)
    yield "embedding.position.weight", (config.max_position_embeddings, config.hidden_size)


def _block(config: ModelConfig, path: str) -> Shapes:
    hidden, heads_width = config.hidden_size, config.num_attention_heads * config.kv_channels
    yield from _norm(f"{path}.attention_norm", hidden)
    yield from _linear(f"{path}.attention.qkv", 3 * heads_width, hidden)
    yield from _linear(f"{path}.attention.projection", hidden, heads_width)
    yield from _norm(f"{path}.mlp_norm", hidden)
    yield from _linear(f"{path}.mlp.up", config.ffn_hidden_size, hidden)
    yield from _linear(f"{path}.mlp.down", hidden, config.ffn_hidden_size)


def _linear(path: str, rows: int, columns: int) -> Shapes:
    yield f"{path}.weight", (rows, columns)
    yield f"{path}.bias", (rows,)


def _norm(path: str, hidden: int) -> Shapes:
    yield f"{path}.weight", (hidden,)
    yield f"{path}.bias", (hidden,)


def _no_values(start: int, stop: int) -> NoReturn:
    raise RuntimeError("the shape of a model has no values; build model.gpt.GPT for them")
