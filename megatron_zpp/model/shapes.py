"""The name, shape and row order of every parameter of a GPT, from the configuration alone (no torch).

Used to plan a run without building its model, and to convert weights. V padded vocabulary, P learned positions, H hidden size, F
feed-forward hidden size, D channels of a head, N heads, K key and value heads (K = N unless --num-query-groups is less), i block.

    embedding.word.weight                  [V, H]
    embedding.position.weight              [P, H]           only --position-embedding-type learned_absolute
    blocks.i.attention_norm.weight         [H]
    blocks.i.attention.qkv.weight          [(N + 2 K) D, H]
    blocks.i.attention.qkv.bias            [(N + 2 K) D]    unless --disable-bias-linear is given without --add-qkv-bias
    blocks.i.attention.query_norm.weight   [D]              only --qk-layernorm; one gain for all heads
    blocks.i.attention.key_norm.weight     [D]              only --qk-layernorm
    blocks.i.attention.projection.weight   [H, N D]
    blocks.i.attention.projection.bias     [H]              unless --disable-bias-linear
    blocks.i.mlp_norm.weight               [H]
    blocks.i.mlp.up.weight                 [F, H]           [2 F, H] with --swiglu
    blocks.i.mlp.up.bias                   [F]              [2 F] with --swiglu; unless --disable-bias-linear
    blocks.i.mlp.down.weight               [H, F]
    blocks.i.mlp.down.bias                 [H]              unless --disable-bias-linear
    final.norm.weight                      [H]
    final.head.weight                      [V, H]           only --untie-embeddings-and-output-weights

Every norm has a bias beside its weight unless --normalization RMSNorm. With --apply-layernorm-1p a norm's weight is its gain minus 1.

Rows of qkv, as Megatron orders them: K groups one after the other, each with N / K queries, then its key, then its value, of D rows each:
row ((N / K + 2) g + m) D + d is channel d of query head g N / K + m for m < N / K, of key head g for m = N / K, and of value head g for
m = N / K + 1. With K = N these are the q, k and v of one head after the other.
Columns of projection: channel d of head n is column n D + d.
Rows of up with --swiglu: F rows of the gate (through SiLU), then F rows of the value.
Rotation (see model/rotary.py) pairs channel d with d + R / 2 of the first R = --rotary-percent x D channels, as Llama's Hugging Face layout
does; with --rotary-interleaved it pairs 2 d with 2 d + 1.
"""

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
    """The units and uses of `model.gpt.GPT` for the same configuration; the parameters have shapes but no values."""

    config: ModelConfig
    padded_vocab_size: int

    def unit_specs(self) -> tuple[UnitSpec, ...]:
        """Every parameter once, grouped into the units that are gathered together."""
        config, hidden = self.config, self.config.hidden_size
        units = {"embedding": _embedding(config, self.padded_vocab_size)}
        units |= {f"block.{index}": _block(config, f"blocks.{index}") for index in range(config.num_layers)}
        units["final_norm"] = _norm(config, "final.norm", hidden)
        if config.untie_embeddings_and_output_weights:
            units["head"] = iter([("final.head.weight", (self.padded_vocab_size, hidden))])
        return tuple(
            UnitSpec(name, tuple(ParamSpec(*shape, _no_values, len(shape[1]) > 1) for shape in shapes)) for name, shapes in units.items()
        )

    def uses(self) -> tuple[Use, ...]:
        """The uses of the model: see `uses_of`."""
        return uses_of(self.config)


def uses_of(config: ModelConfig) -> tuple[Use, ...]:
    """The module calls of one forward in order, with the units that each reads. The first and the last read a tied embedding."""
    output_unit = "head" if config.untie_embeddings_and_output_weights else "embedding"
    chunk_of = {block: number for number, chunk in enumerate(recomputed_chunks(config)) for block in chunk}
    return (
        Use("embedding", ("embedding",), needs_weights_in_backward=False),
        *(Use(f"blocks.{index}", (f"block.{index}",), True, chunk_of.get(index)) for index in range(config.num_layers)),
        Use("final", ("final_norm", output_unit), needs_weights_in_backward=True),
    )


def _embedding(config: ModelConfig, padded_vocab_size: int) -> Shapes:
    yield "embedding.word.weight", (padded_vocab_size, config.hidden_size)
    if config.learns_positions:
        yield "embedding.position.weight", (config.max_position_embeddings, config.hidden_size)


def _block(config: ModelConfig, path: str) -> Shapes:
    yield from _norm(config, f"{path}.attention_norm", config.hidden_size)
    yield from _attention(config, f"{path}.attention")
    yield from _norm(config, f"{path}.mlp_norm", config.hidden_size)
    hidden, ffn, has_bias = config.hidden_size, config.ffn_hidden_size, config.has_linear_bias
    yield from _linear(f"{path}.mlp.up", 2 * ffn if config.swiglu else ffn, hidden, has_bias)
    yield from _linear(f"{path}.mlp.down", hidden, ffn, has_bias)


def _attention(config: ModelConfig, path: str) -> Shapes:
    yield from _linear(f"{path}.qkv", config.qkv_width, config.hidden_size, config.has_qkv_bias)
    if config.qk_layernorm:
        yield from _norm(config, f"{path}.query_norm", config.kv_channels)
        yield from _norm(config, f"{path}.key_norm", config.kv_channels)
    yield from _linear(f"{path}.projection", config.hidden_size, config.heads_width, config.has_linear_bias)


def _linear(path: str, rows: int, columns: int, has_bias: bool) -> Shapes:
    yield f"{path}.weight", (rows, columns)
    if has_bias:
        yield f"{path}.bias", (rows,)


def _norm(config: ModelConfig, path: str, width: int) -> Shapes:
    yield f"{path}.weight", (width,)
    if config.normalization == "LayerNorm":
        yield f"{path}.bias", (width,)


def _no_values(start: int, stop: int) -> NoReturn:
    raise RuntimeError("the shape of a model has no values; build model.gpt.GPT for them")
