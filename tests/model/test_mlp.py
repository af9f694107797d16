from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.mlp import activation_of, gated_silu


def plainly(gate_and_value: Tensor) -> Tensor:
    gate, value = gate_and_value.chunk(2, dim=-1)
    return F.silu(gate) * value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gated_silu_and_its_gradient_have_the_bits_of_autograds(dtype: torch.dtype) -> None:
    values = torch.randn(4, 5, 14, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = []
    for function in (gated_silu, plainly):
        leaf = values.clone().requires_grad_()
        out = function(leaf)
        (out * weights).sum().backward()
        assert leaf.grad is not None
        found.append((out.detach(), leaf.grad))
    assert all(torch.equal(own, expected) for own, expected in zip(*found, strict=True))


def test_gated_silu_keeps_its_input_alone() -> None:
    leaf = torch.randn(3, 14, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        gated_silu(leaf)
    assert [tensor.data_ptr() for tensor in kept] == [leaf.data_ptr()]


@pytest.mark.parametrize(
    ("flags", "is_exact"),
    [
        ({}, False),
        ({"no_bias_gelu_fusion": True}, True),
        ({"disable_bias_linear": True}, True),
        ({"disable_bias_linear": True, "openai_gelu": True}, False),
        ({"no_bias_gelu_fusion": True, "openai_gelu": True}, False),
    ],
    ids=str,
)
def test_gelu_has_the_form_that_megatrons_flags_choose(flags: dict[str, bool], is_exact: bool) -> None:
    activation = activation_of(ModelConfig(**flags))
    values = torch.linspace(-6, 6, 241, dtype=torch.float64)
    exact = [z / 2 * (1 + math.erf(z / math.sqrt(2))) for z in values.tolist()]
    by_tanh = [z / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) for z in values.tolist()]
    expected, other = (exact, by_tanh) if is_exact else (by_tanh, exact)
    found = activation(values)
    # Both forms are a few roundings of fp64 at |z| <= 6; they differ from each other by up to 5e-4.
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)
    assert not torch.allclose(found, torch.tensor(other, dtype=torch.float64), rtol=0, atol=1e-4)


def test_other_activations_than_gelu_have_no_form() -> None:
    for flags in ({"swiglu": True}, {"squared_relu": True}):
        config = ModelConfig(**flags, disable_bias_linear=True, no_bias_gelu_fusion=True)
        assert not config.has_exact_gelu and activation_of(config) is not F.gelu
