from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from harness.small_gpt import VOCAB, small_config
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.model.initialization import CHUNK_NUMEL, normal_values

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
