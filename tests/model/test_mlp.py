from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.model.mlp import gated_silu


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
