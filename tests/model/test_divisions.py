"""The table of model/divisions.py against plain slicing in the order of rows that model/shapes.py documents."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from harness.small_gpt import small_config
from harness.tensor_parts import MODELS, VOCAB, config_of, part_of

from megatron_zpp.model import divisions
from megatron_zpp.model.divisions import Role
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.division import Division, HeldRange
from megatron_zpp.parallel.specs import ParamSpec
from megatron_zpp.system.user_error import UserError

RANKS = (2, 4, 8)


def specs_of(shape: ModelShape) -> Iterator[ParamSpec]:
    return (spec for unit in shape.unit_specs() for spec in unit.params)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", list(MODELS))
def test_every_part_has_the_elements_that_plain_slicing_gives(model: str, ranks: int) -> None:
    config = config_of(model)
    for rank in range(ranks):
        for spec in specs_of(ModelShape(config, VOCAB, ranks, rank)):
            whole = torch.arange(math.prod(spec.whole_shape)).view(spec.whole_shape)
            expected = part_of(spec.name, whole, config, ranks, rank)
            assert spec.shape == tuple(expected.shape), spec.name
            assert torch.equal(elements_of(spec.division), expected.flatten()), spec.name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", list(MODELS))
def test_every_element_of_the_model_is_counted_by_exactly_one_rank(model: str, ranks: int) -> None:
    parts = [specs_of(ModelShape(config_of(model), VOCAB, ranks, rank)) for rank in range(ranks)]
    for specs in zip(*parts, strict=True):
        counted = []
        for spec in specs:
            is_counted = torch.ones(math.prod(spec.shape), dtype=torch.bool)
            for shared in spec.shared:
                is_counted[shared.start : shared.stop] = shared.counted
            counted.append(elements_of(spec.division)[is_counted])
        assert torch.equal(torch.cat(counted).sort().values, torch.arange(math.prod(specs[0].whole_shape))), specs[0].name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", list(MODELS))
def test_the_parts_of_all_ranks_have_the_same_names_shapes_and_shared_ranges(model: str, ranks: int) -> None:
    def told(rank: int) -> list[object]:
        specs = specs_of(ModelShape(config_of(model), VOCAB, ranks, rank))
        return [
            (spec.name, spec.shape, spec.weight_decay, [(part.start, part.stop, part.gradient) for part in spec.shared]) for spec in specs
        ]

    assert all(told(rank) == told(0) for rank in range(1, ranks))


@pytest.mark.parametrize("model", list(MODELS))
def test_the_whole_model_is_the_same_for_every_number_of_ranks(model: str) -> None:
    whole = list(specs_of(ModelShape(config_of(model), VOCAB)))
    assert all(spec.division == Division.undivided(spec.whole_shape) and not spec.shared for spec in whole)
    for ranks in RANKS:
        parts = specs_of(ModelShape(config_of(model), VOCAB, ranks, ranks - 1))
        found = [(spec.name, spec.whole_shape, spec.weight_decay) for spec in parts]
        assert found == [(spec.name, spec.shape, spec.weight_decay) for spec in whole]


def test_the_picture_in_the_module_is_true() -> None:
    lines = [line[4:] for line in (divisions.__doc__ or "").splitlines() if line.startswith("    ")]
    columns = [lines[0].index(word) for word in ("parameter", "T = 2", "T = 4", "gradient", "sp")]
    drawn = [[line[start:stop].strip() for start, stop in zip(columns, [*columns[1:], None], strict=True)] for line in lines[1:]]
    assert drawn == [row_of(row[0]) for row in drawn]
    roles = {row[0].removesuffix(".bias") for row in drawn}
    assert roles == {role.value for role in Role}


def row_of(parameter: str) -> list[str]:
    """The row of the picture, from the divisions of rank 1."""
    changes = {"num_attention_heads": 4, "kv_channels": 2, "num_query_groups": 2, "ffn_hidden_size": 4, "max_position_embeddings": 4}
    config = small_config(hidden_size=8, qk_layernorm=True, **changes)
    cells, gradients = [], []
    for ranks, sequence_parallel in ((2, False), (4, False), (4, True)):
        shape = ModelShape(config, 8, ranks, 1, sequence_parallel)
        role = Role(parameter.removesuffix(".bias"))
        division = shape.bias(role) if parameter.endswith(".bias") else shape.weight(role)
        assert division is not None
        cells.append(in_words(division))
        gradients.append(next((shared.gradient.value for shared in division.shared()), ""))
    return [parameter, *cells[:2], *gradients[1:]]


def in_words(division: Division) -> str:
    own = [held for held in division.ranges if 1 in held.holders]
    words = {"columns" if division.dim else "rows": [held for held in own if len(held.holders) == 1]}
    words["shared"] = [held for held in own if len(held.holders) > 1]
    return ", ".join(f"{word} {', '.join(map(from_to, ranges))}" for word, ranges in words.items() if ranges)


def from_to(held: HeldRange) -> str:
    return f"{held.start}-{held.stop - 1}" if held.stop - held.start > 1 else str(held.start)


def test_a_bias_has_the_elements_of_its_weights_rows_where_these_are_divided() -> None:
    for ranks in RANKS:
        shape = ModelShape(config_of("one key head, every bias"), VOCAB, ranks, 1)
        for role in (Role.QKV, Role.UP, Role.GATED_UP):
            bias = shape.bias(role)
            assert bias is not None and bias.ranges == shape.weight(role).ranges and bias.gradient is shape.weight(role).gradient


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    with pytest.raises(UserError, match=f"tensor rank {rank} is not one of 2; choose 0 to 1"):
        ModelShape(config_of("GPT-2"), VOCAB, 2, rank)


def test_ranks_that_cannot_share_the_model_are_refused_with_flags() -> None:
    with pytest.raises(UserError, match="--num-attention-heads 8 is not a multiple of --tensor-model-parallel-size 3; choose"):
        ModelShape(config_of("GPT-2"), VOCAB, 3, 0)


def elements_of(division: Division) -> torch.Tensor:
    """The numbers of the part's elements in the flattened whole parameter."""
    matrix = torch.arange(division.numel).view(-1, division.width)
    placed = list(division.stripes(0, math.prod(division.local_shape)))
    return torch.cat([matrix[:, slice(*one.stripe.columns)].flatten()[one.stripe.start : one.stripe.stop] for one in placed])
