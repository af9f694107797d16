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
How tensor ranks divide the parameters: model/divisions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NoReturn

from megatron_zpp.config.rules_tensor import check_tensor_ranks
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.model.divisions import RULES, Cut, Role, division_of
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec, Use
from megatron_zpp.system.user_error import UserError

if TYPE_CHECKING:
    from torch import Tensor

InitialValues = Callable[[int, int], "Tensor"]


def _no_values(name: str, division: Division) -> InitialValues:
    def refuse(start: int, stop: int) -> NoReturn:
        raise RuntimeError(f"the shape of a model has no values of {name}; build model.gpt.GPT for them")

    return refuse


@dataclass(frozen=True)
class ModelShape:
    """The units, parameters and uses of `model.gpt.GPT` for the same configuration, and the part of one tensor rank in each parameter.

    Raises UserError, with flags, for a size of the model that the tensor ranks cannot share.
    """

    config: ModelConfig
    padded_vocab_size: int
    tensor_ranks: int = 1
    tensor_rank: int = 0
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tensor_rank < self.tensor_ranks:
            raise UserError(f"tensor rank {self.tensor_rank} is not one of {self.tensor_ranks}; choose 0 to {self.tensor_ranks - 1}")
        if self.tensor_ranks > 1:
            check_tensor_ranks(self.config, self.padded_vocab_size, self.tensor_ranks)

    def weight(self, role: Role) -> Division:
        """The part in the weight of a role."""
        return self._division(role, RULES[role].weight, self._weight_shape(role))

    def bias(self, role: Role) -> Division | None:
        """The part in the bias of a role; None if it has no bias."""
        cut = RULES[role].bias
        return None if cut is None or not self._has_bias(role) else self._division(role, cut, self._weight_shape(role)[:1])

    def unit_specs(self, initial_values: Callable[[str, Division], InitialValues] = _no_values) -> tuple[UnitSpec, ...]:
        """Every parameter once, grouped into the units that are gathered together.

        initial_values: makes the initial values of a parameter's part; by default there are none.
        """
        divisions = cache(self._divisions)  # all blocks have the same

        def params(modules: Sequence[tuple[str, Role]]) -> Iterator[ParamSpec]:
            for path, role in modules:
                for kind, division in divisions(role):
                    name = f"{path}.{kind}"
                    yield ParamSpec(name, division, initial_values(name, division), weight_decay=len(division.shape) > 1)

        return tuple(UnitSpec(unit, tuple(params(modules))) for unit, modules in self._units())

    def uses(self) -> tuple[Use, ...]:
        """The module calls of one forward in order, with the units that each reads. The first and the last read a tied embedding."""
        config = self.config
        output_unit = "head" if config.untie_embeddings_and_output_weights else "embedding"
        chunk_of = {block: number for number, chunk in enumerate(recomputed_chunks(config)) for block in chunk}
        return (
            Use("embedding", ("embedding",), needs_weights_in_backward=False),
            *(Use(f"blocks.{index}", (f"block.{index}",), True, chunk_of.get(index)) for index in range(config.num_layers)),
            Use("final", ("final_norm", output_unit), needs_weights_in_backward=True),
        )

    def _units(self) -> Iterator[tuple[str, list[tuple[str, Role]]]]:
        """Each unit with the path and the role of its modules that have parameters, in order."""
        config = self.config
        positions = [("embedding.position", Role.POSITION)] if config.learns_positions else []
        yield "embedding", [("embedding.word", Role.WORD), *positions]
        for index in range(config.num_layers):
            yield f"block.{index}", [(f"blocks.{index}.{path}", role) for path, role in _block(config)]
        yield "final_norm", [("final.norm", Role.NORM)]
        if config.untie_embeddings_and_output_weights:
            yield "head", [("final.head", Role.HEAD)]

    def _divisions(self, role: Role) -> tuple[tuple[str, Division], ...]:
        bias = self.bias(role)
        return (("weight", self.weight(role)), *([] if bias is None else [("bias", bias)]))

    def _division(self, role: Role, cut: Cut, shape: tuple[int, ...]) -> Division:
        holders = RULES[role].gradient
        gradient = holders.with_sequence_parallel if self.sequence_parallel else holders.without_sequence_parallel
        return division_of(cut, shape, self.config, self.tensor_ranks, self.tensor_rank, gradient)

    def _weight_shape(self, role: Role) -> tuple[int, ...]:
        config = self.config
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        shapes: dict[Role, tuple[int, ...]] = {
            Role.WORD: (self.padded_vocab_size, hidden),
            Role.POSITION: (config.max_position_embeddings, hidden),
            Role.NORM: (hidden,),
            Role.QKV: (config.qkv_width, hidden),
            Role.HEAD_NORM: (config.kv_channels,),
            Role.PROJECTION: (hidden, config.heads_width),
            Role.UP: (ffn, hidden),
            Role.GATED_UP: (2 * ffn, hidden),
            Role.DOWN: (hidden, ffn),
            Role.HEAD: (self.padded_vocab_size, hidden),
        }
        return shapes[role]

    def _has_bias(self, role: Role) -> bool:
        if role in (Role.NORM, Role.HEAD_NORM):
            return self.config.normalization == "LayerNorm"
        return self.config.has_qkv_bias if role is Role.QKV else self.config.has_linear_bias


def up_role(config: ModelConfig) -> Role:
    """The role of the first linear layer of a feed-forward half."""
    return Role.GATED_UP if config.swiglu else Role.UP


def _block(config: ModelConfig) -> Iterator[tuple[str, Role]]:
    yield "attention_norm", Role.NORM
    yield "attention.qkv", Role.QKV
    if config.qk_layernorm:
        yield "attention.query_norm", Role.HEAD_NORM
        yield "attention.key_norm", Role.HEAD_NORM
    yield "attention.projection", Role.PROJECTION
    yield "mlp_norm", Role.NORM
    yield "mlp.up", up_role(config)
    yield "mlp.down", Role.DOWN
