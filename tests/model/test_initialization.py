from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from harness.small_gpt import VOCAB, small_config
from harness.tensor_parts import MODELS, config_of, part_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.model.initialization import BATCH_NUMEL, CHUNK_NUMEL, initial_values, normal_values, values_of_part
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.division import Division, HeldRange

NUMEL = 3 * CHUNK_NUMEL + 1000
boundaries = st.one_of(
    st.integers(0, NUMEL), st.integers(0, 3).flatmap(lambda chunk: st.integers(-2, 2).map(lambda off: chunk * CHUNK_NUMEL + off))
)


@settings(max_examples=30)
@given(st.lists(boundaries.map(lambda cut: max(0, cut)), max_size=5))
def test_every_partition_yields_the_same_values(cuts: list[int]) -> None:
    edges = sorted([0, *cuts, NUMEL])
    pieces = [normal_values(1234, "blocks.0.mlp.up.weight", 0.02, start, stop) for start, stop in pairwise(edges)]
    assert torch.equal(torch.cat(pieces), normal_values(1234, "blocks.0.mlp.up.weight", 0.02, 0, NUMEL))


@pytest.mark.parametrize("threads", [2, 7])
def test_values_depend_on_no_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = normal_values(1234, "head.weight", 0.02, 1000, NUMEL)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(normal_values(1234, "head.weight", 0.02, 1000, NUMEL), alone)


def test_values_are_normal() -> None:
    values = normal_values(1234, "embedding.word.weight", 0.02, 0, NUMEL).double() / 0.02
    tolerance = 5 / math.sqrt(NUMEL)  # five standard errors
    assert abs(values.mean()) < tolerance
    assert abs(values.square().mean() - 1) < tolerance * math.sqrt(2)
    assert abs(values.abs().lt(1).double().mean() - math.erf(1 / math.sqrt(2))) < tolerance
    assert 4 < values.abs().max() < 7


def test_seeds_names_and_chunks_have_values_of_their_own() -> None:
    pieces = [
        normal_values(1, "a", 1.0, 0, 1000),
        normal_values(2, "a", 1.0, 0, 1000),
        normal_values(1, "b", 1.0, 0, 1000),
        normal_values(1, "a", 1.0, CHUNK_NUMEL, CHUNK_NUMEL + 1000),
    ]
    correlations = torch.corrcoef(torch.stack(pieces)) - torch.eye(4)
    assert correlations.abs().max() < 5 / math.sqrt(1000)


def test_matrices_have_the_configured_std_and_residual_projections_a_scaled_one() -> None:
    config = small_config(num_layers=8, init_method_std=0.03, untie_embeddings_and_output_weights=True)
    model = materialize(GPT(config, 2048, 1, torch.float32))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            expected = 0.03 / 4 if name.endswith(("attention.projection.weight", "mlp.down.weight")) else 0.03
            assert parameter.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * parameter.numel())), name


def test_biases_begin_at_zero_and_gains_at_one() -> None:
    model = materialize(GPT(small_config(), VOCAB, 1, torch.bfloat16))
    vectors = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 1}
    gains = {name for name in vectors if name.endswith("norm.weight")}
    assert len(gains) == 2 * model.config.num_layers + 1
    assert all(vectors[name].eq(1 if name in gains else 0).all() for name in vectors)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_gains_that_are_stored_minus_one_begin_at_zero(normalization: str) -> None:
    model = materialize(GPT(small_config(normalization=normalization, apply_layernorm_1p=True, qk_layernorm=True), VOCAB, 1, torch.float32))
    assert all(parameter.eq(0).all() for parameter in model.parameters() if parameter.ndim == 1)
    ones = materialize(GPT(small_config(normalization=normalization, qk_layernorm=True), VOCAB, 1, torch.float32))
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens, None, first_sample=0), ones(tokens, None, first_sample=0))


def test_a_materialized_model_holds_the_values_of_its_specs_in_its_dtype() -> None:
    model = materialize(GPT(small_config(), VOCAB, 1, torch.bfloat16))
    for spec in (spec for unit in model.unit_specs() for spec in unit.params):
        parameter = model.get_parameter(spec.name)
        assert parameter.requires_grad and parameter.is_leaf
        assert torch.equal(parameter.flatten(), spec.initial_values(0, parameter.numel()).bfloat16()), spec.name


def test_a_larger_padded_vocabulary_leaves_the_first_rows_as_they_are() -> None:
    small, large = (materialize(GPT(small_config(), vocab, 1, torch.float32)).embedding.word.weight for vocab in (64, 128))
    assert torch.equal(small, large[:64])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("model", list(MODELS))
def test_the_first_values_of_every_part_have_the_bits_of_the_whole_models(model: str, ranks: int) -> None:
    config, rows = config_of(model), 64
    whole = {name: parameter.detach() for name, parameter in materialize(GPT(config, rows, 7, torch.float32)).named_parameters()}
    for rank in range(ranks):
        shape = ModelShape(config, rows, ranks, rank)
        specs = {spec.name: spec for unit in shape.unit_specs(partial(initial_values, config, 7)) for spec in unit.params}
        assert list(specs) == list(whole)
        for name, spec in specs.items():
            expected = part_of(name, whole[name], config, ranks, rank)
            assert torch.equal(spec.initial_values(0, expected.numel()).view(spec.shape), expected), name


# A part of columns in a matrix of more elements than are drawn at a time, and rows of which some are shared. Rows end inside of chunks.
WIDE = (BATCH_NUMEL // 1000 + 200, 1000)
PARTS = (
    Division.evenly(WIDE, 1, 4, 1),
    Division(
        WIDE, 0, (HeldRange(0, 500, (0,)), HeldRange(500, 600, (1,)), HeldRange(600, 1100, (0,)), HeldRange(1100, WIDE[0], (0, 1))), 1
    ),
)


@pytest.fixture(scope="module")
def wide() -> Tensor:
    return normal_values(3, "wide", 0.02, 0, math.prod(WIDE)).view(WIDE)


@settings(max_examples=20)
@given(st.data())
def test_a_range_of_a_part_has_the_bits_of_the_part(wide: Tensor, data: st.DataObject) -> None:
    division = data.draw(st.sampled_from(PARTS))
    numel = math.prod(division.local_shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.one_of(st.integers(start, numel), st.integers(start, min(numel, start + 500))))
    part = wide[:, 250:500] if division.dim else torch.cat([wide[500:600], wide[1100:]])
    found = values_of_part(division, partial(normal_values, 3, "wide", 0.02), start, stop)
    assert torch.equal(found, part.flatten()[start:stop])


def test_a_part_of_columns_draws_each_row_once_in_few_batches() -> None:
    asked: list[tuple[int, int]] = []

    def whole(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return torch.zeros(stop - start)

    rows = BATCH_NUMEL // WIDE[1]
    values_of_part(PARTS[0], whole, 0, math.prod(PARTS[0].local_shape))
    assert asked == [(0, rows * WIDE[1]), (rows * WIDE[1], math.prod(WIDE))]
    asked.clear()
    values_of_part(PARTS[0], whole, 250 * 3 + 7, 250 * 5 + 1)
    assert asked == [(3 * WIDE[1], 6 * WIDE[1])]


def test_a_part_that_is_the_whole_parameter_asks_for_the_range_itself() -> None:
    asked: list[tuple[int, int]] = []

    def whole(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return torch.zeros(stop - start)

    drawn = values_of_part(Division.undivided(WIDE), whole, 5, math.prod(WIDE))
    assert asked == [(5, math.prod(WIDE))] and drawn.numel() == math.prod(WIDE) - 5
    assert values_of_part(Division.undivided(WIDE), whole, 5, 5).numel() == 0
