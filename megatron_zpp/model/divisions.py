"""How T tensor ranks divide each parameter of a GPT, and what backward leaves on those that hold the same elements: one table (no torch).

What rank 1 has in a model with H = 8, N = 4 heads of D = 2 channels in K = 2 groups, F = 4, V = 8 and P = 4 (letters: model/shapes.py).
"shared" elements are on other ranks, too. On each of these holders, backward leaves their whole gradient, or a part of it: then the parts
of all holders add up to the gradient. sp: with sequence parallelism.

    parameter            T = 2               T = 4                      gradient         sp
    embedding.word       rows 4-7            rows 2-3
    embedding.position   rows 2-3            rows 1
    norm                 shared 0-7          shared 0-7                 whole            partial
    qkv                  rows 8-15           rows 2-3, shared 4-7       partial          partial
    head_norm            shared 0-1          shared 0-1                 partial          partial
    projection           columns 4-7         columns 2-3
    projection.bias      shared 0-7          shared 0-7                 whole            partial
    up                   rows 2-3            rows 1
    gated_up             rows 2-3, 6-7       rows 1, 5
    down                 columns 2-3         columns 1
    down.bias            shared 0-7          shared 0-7                 whole            partial
    head                 rows 4-7            rows 2-3

The biases of qkv, up and gated_up have the elements of the weight's rows.

qkv: with K >= T, a rank has whole groups, each of them one range of rows. With K < T, T / K ranks have one group: each has N / T of its
queries, and all have its key and its value. The gradient of these comes through a rank's own queries alone, so it is partial.
head_norm, the norms of queries and keys, has one gain for all heads. A rank normalizes its own heads alone, so the gradient is partial.
norm, projection.bias and down.bias act where every rank has the same values and the same gradient of them, so theirs is whole. With
sequence parallelism a rank has only its own tokens there, so it is partial.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.parallel.division import Division, Gradient, HeldRange


class Role(enum.Enum):
    """What a module with parameters of its own does in the model. It has a weight, and some have a bias."""

    WORD = "embedding.word"
    POSITION = "embedding.position"
    NORM = "norm"  # of hidden states: attention_norm, mlp_norm and final.norm
    QKV = "qkv"
    HEAD_NORM = "head_norm"  # query_norm and key_norm
    PROJECTION = "projection"
    UP = "up"
    GATED_UP = "gated_up"
    DOWN = "down"
    HEAD = "head"


class Cut(enum.Enum):
    """How the elements of a parameter are dealt to the tensor ranks."""

    SHARED = "each rank has all of them"
    ROWS = "as many rows for each rank"
    HALVES = "as many rows of the first half, and as many of the second, for each rank"
    COLUMNS = "as many columns for each rank"
    GROUPS = "the rows of qkv: groups to ranks, or ranks to groups"


@dataclass(frozen=True)
class HolderGradient:
    """What backward leaves on one rank that holds an element."""

    without_sequence_parallel: Gradient
    with_sequence_parallel: Gradient


@dataclass(frozen=True)
class Rule:
    """A row of the table: how the weight and the bias of a role are cut, and the gradient on one holder of a shared element."""

    weight: Cut
    bias: Cut | None = None  # None: the role has no bias
    gradient: HolderGradient = HolderGradient(Gradient.WHOLE, Gradient.WHOLE)  # nothing is shared


BETWEEN_LAYERS = HolderGradient(Gradient.WHOLE, Gradient.PARTIAL)
INSIDE_HEADS = HolderGradient(Gradient.PARTIAL, Gradient.PARTIAL)
RULES: Mapping[Role, Rule] = MappingProxyType(
    {
        Role.WORD: Rule(Cut.ROWS),
        Role.POSITION: Rule(Cut.ROWS),
        Role.NORM: Rule(Cut.SHARED, Cut.SHARED, BETWEEN_LAYERS),
        Role.QKV: Rule(Cut.GROUPS, Cut.GROUPS, INSIDE_HEADS),
        Role.HEAD_NORM: Rule(Cut.SHARED, Cut.SHARED, INSIDE_HEADS),
        Role.PROJECTION: Rule(Cut.COLUMNS, Cut.SHARED, BETWEEN_LAYERS),
        Role.UP: Rule(Cut.ROWS, Cut.ROWS),
        Role.GATED_UP: Rule(Cut.HALVES, Cut.HALVES),
        Role.DOWN: Rule(Cut.COLUMNS, Cut.SHARED, BETWEEN_LAYERS),
        Role.HEAD: Rule(Cut.ROWS),
    }
)


def division_of(cut: Cut, shape: tuple[int, ...], config: ModelConfig, ranks: int, rank: int, gradient: Gradient) -> Division:
    """The part of tensor rank `rank` of `ranks` in a parameter of `shape`. gradient: on one holder of a shared element.

    Raises UserError if the ranks cannot share the parameter; config/rules_tensor.py says it in terms of flags.
    """
    if ranks == 1:
        return Division.undivided(shape)
    if cut is Cut.SHARED:
        return Division.undivided(shape, ranks, rank, gradient)
    if cut is Cut.ROWS or (cut is Cut.GROUPS and config.key_value_heads >= ranks):
        return Division.evenly(shape, 0, ranks, rank)
    if cut is Cut.COLUMNS:
        return Division.evenly(shape, 1, ranks, rank)
    ranges = _halves(shape[0], ranks) if cut is Cut.HALVES else _ranks_of_groups(config, ranks)
    return Division(shape, 0, tuple(ranges), rank, gradient)


def _halves(rows: int, ranks: int) -> Iterator[HeldRange]:
    """The rows of the gate, then those of the value, the same share of both for each rank."""
    length = rows // 2 // ranks
    yield from (HeldRange(index * length, (index + 1) * length, (index % ranks,)) for index in range(2 * ranks))


def _ranks_of_groups(config: ModelConfig, ranks: int) -> Iterator[HeldRange]:
    """The rows of qkv where several ranks have one group: queries of each of them, then the key and the value of all."""
    sharing = ranks // config.key_value_heads
    queries = config.num_attention_heads // ranks * config.kv_channels
    position = 0
    for first in range(0, ranks, sharing):
        holders = tuple(range(first, first + sharing))
        for length, having in (*((queries, (holder,)) for holder in holders), (2 * config.kv_channels, holders)):
            yield HeldRange(position, position + length, having)
            position += length
