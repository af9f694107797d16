from __future__ import annotations

from typing import Any

import pytest
import torch
from small_gpt import loss_and_gradients, sample_batch, small_gpt

DROPOUT: dict[str, Any] = {"attention_dropout": 0.2, "hidden_dropout": 0.2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_changes_no_bit_of_loss_and_gradients_with_dropout_on(dtype: torch.dtype) -> None:
    plain_loss, plain = loss_and_gradients(small_gpt(dtype=dtype, **DROPOUT), first_sample=40)
    loss, recomputed = loss_and_gradients(small_gpt(dtype=dtype, recompute_granularity="full", **DROPOUT), first_sample=40)
    assert torch.equal(loss, plain_loss)
    assert recomputed.keys() == plain.keys()
    assert all(torch.equal(recomputed[name], plain[name]) for name in plain)


def test_recomputation_repeats_the_module_call_so_that_its_hooks_fire_again() -> None:
    model = small_gpt(recompute_granularity="full", **DROPOUT)
    calls: list[int] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    loss_BS = model(*sample_batch(), first_sample=0)
    assert calls == [0, 1]
    loss_BS.sum().backward()
    assert calls == [0, 1, 1, 0]


def test_without_gradients_nothing_is_recomputed_and_nothing_kept() -> None:
    model = small_gpt(recompute_granularity="full")
    with torch.no_grad():
        without = model(*sample_batch(), first_sample=0)
    assert torch.equal(without, model(*sample_batch(), first_sample=0).detach())
    assert not without.requires_grad
