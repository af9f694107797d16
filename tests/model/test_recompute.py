from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.small_gpt import ARCHITECTURES, loss_and_gradients, sample_batch, small_gpt

DROPOUT: dict[str, Any] = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
FULL: dict[str, Any] = {"recompute_granularity": "full"}
KINDS: dict[str, dict[str, Any]] = {
    "every block": FULL,
    "chunks of two, then one": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2},
    "all blocks as one chunk": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 3},
    "the first two blocks": {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    "attention": {"recompute_granularity": "selective"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("architecture", ["GPT-2", "Qwen3"])
def test_recomputation_changes_no_bit_of_loss_and_gradients_with_dropout_on(dtype: torch.dtype, kind: str, architecture: str) -> None:
    changes = {"num_layers": 3, **ARCHITECTURES[architecture], **DROPOUT}
    plain_loss, plain = loss_and_gradients(small_gpt(dtype=dtype, **changes), first_sample=40)
    loss, recomputed = loss_and_gradients(small_gpt(dtype=dtype, **changes, **KINDS[kind]), first_sample=40)
    assert torch.equal(loss, plain_loss)
    assert recomputed.keys() == plain.keys()
    assert all(torch.equal(recomputed[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("every block", [2, 1, 0]),
        ("chunks of two, then one", [2, 0, 1]),
        ("all blocks as one chunk", [0, 1, 2]),
        ("the first two blocks", [1, 0]),
        ("attention", []),
    ],
)
def test_backward_calls_the_blocks_of_a_chunk_again_in_their_order_so_that_their_hooks_fire(kind: str, expected: list[int]) -> None:
    model = small_gpt(num_layers=3, **KINDS[kind], **DROPOUT)
    calls: list[int] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    loss_BS = model(*sample_batch(), first_sample=0)
    assert calls == [0, 1, 2]
    loss_BS.sum().backward()
    assert calls == [0, 1, 2, *expected]


@pytest.mark.parametrize("kind", list(KINDS))
def test_without_gradients_nothing_is_recomputed_and_nothing_kept(kind: str) -> None:
    model = small_gpt(num_layers=3, **KINDS[kind])
    with torch.no_grad():
        without = model(*sample_batch(), first_sample=0)
    assert torch.equal(without, model(*sample_batch(), first_sample=0).detach())
    assert not without.requires_grad
