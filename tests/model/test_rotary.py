from __future__ import annotations

import pytest
import torch
from harness.small_gpt import LLAMA, sample_batch, small_config, small_gpt
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.rotary import RotaryPositions


def rope_config(**changes: object) -> ModelConfig:
    return small_config(position_embedding_type="rope", kv_channels=16, **changes)


def turned(heads_D: Tensor, position: int, config: ModelConfig) -> Tensor:
    rotation = RotaryPositions(config).rotation(torch.tensor([position]), torch.float32)
    return rotation.turned(heads_D.view(1, 1, 1, 1, -1)).flatten()


@given(query=st.integers(0, 4000), key=st.integers(0, 4000), shift=st.integers(0, 4000), interleaved=st.booleans())
def test_scores_depend_on_the_distance_alone(query: int, key: int, shift: int, interleaved: bool) -> None:
    config = rope_config(rotary_interleaved=interleaved, rotary_base=500.0)
    a, b = torch.randn(2, 16, generator=torch.Generator().manual_seed(1)).unbind()
    here, there = (float(turned(a, query + by, config) @ turned(b, key + by, config)) for by in (0, shift))
    assert here == pytest.approx(there, abs=16 * 8000 * 2.0**-24 * 4)  # an angle of up to 8000 is rounded to 2^-24 of it


def test_channels_beyond_the_share_stay_as_they_are_and_lengths_are_kept() -> None:
    heads = torch.randn(16, generator=torch.Generator().manual_seed(2))
    rotated = turned(heads, 7, rope_config(rotary_percent=0.5))
    assert torch.equal(rotated[8:], heads[8:]) and not torch.equal(rotated[:8], heads[:8])
    assert float(rotated.norm()) == pytest.approx(float(heads.norm()), rel=1e-6)
    assert torch.equal(turned(heads, 0, rope_config()), heads)


def test_positions_of_the_caller_are_used_and_count_from_zero_without_them() -> None:
    model, (tokens_BS, _) = small_gpt(**LLAMA), sample_batch()
    counted = torch.arange(12).expand(3, 12)
    plain = model(tokens_BS, None, first_sample=0)
    assert torch.equal(model(tokens_BS, None, first_sample=0, position_ids_BS=counted), plain)
    # Scores depend only on distances. So a common shift changes nothing but rounding, and stretching changes a lot.
    assert (model(tokens_BS, None, first_sample=0, position_ids_BS=counted + 100) - plain).abs().max() < 1e-3
    assert (model(tokens_BS, None, first_sample=0, position_ids_BS=3 * counted) - plain).abs().max() > 0.1


def test_a_sample_may_be_longer_than_any_position_in_training() -> None:
    tokens_BS, labels_BS = sample_batch(length=40)
    assert small_gpt(**LLAMA)(tokens_BS, labels_BS, first_sample=0).isfinite().all()


def test_nothing_but_two_tables_for_all_blocks_is_kept_for_backward() -> None:
    rotation = RotaryPositions(rope_config()).rotation(torch.arange(12), torch.bfloat16)
    heads = torch.randn(3, 12, 4, 1, 16).bfloat16().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        rotation.turned(heads)
    assert {tensor.data_ptr() for tensor in kept} == {rotation.cos.data_ptr(), rotation.sin.data_ptr()}
