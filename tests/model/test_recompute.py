"""Activations that backward computes again."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.small_gpt import ARCHITECTURES, loss_and_gradients, sample_batch, small_gpt
from torch import Tensor

from megatron_zpp.model.recompute import recomputed

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


# ---- of any function


def test_random_numbers_are_drawn_again_and_what_is_drawn_later_is_what_it_would_have_been() -> None:
    def gradient_and_next_draw(recomputes: bool) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(5)
        values = torch.arange(1.0, 65.0, requires_grad=True)
        output = recomputed(_dropped, values, restores_generator=True) if recomputes else _dropped(values)
        between = torch.rand(3)
        output.sum().backward()
        assert values.grad is not None
        return values.grad, between, torch.rand(3)

    plain, again = gradient_and_next_draw(False), gradient_and_next_draw(True)
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert (plain[0] == 0).any()


def _dropped(values: Tensor) -> Tensor:
    return F.dropout(values.sin(), 0.5).exp()


def test_only_the_inputs_are_kept_until_backward_and_nothing_after_it() -> None:
    made: list[weakref.ref[Tensor]] = []

    def function(values: Tensor, factor: float) -> Tensor:
        middle = (values * factor).exp()  # saves its result
        made.append(weakref.ref(middle))
        return middle.sin().exp()

    values = torch.ones(4, requires_grad=True)
    kept, output = function(values, 0.5), recomputed(function, values, 0.5)
    assert [tensor() is None for tensor in made] == [False, True]
    (kept + output).sum().backward()
    assert len(made) == 3 and all(tensor() is None for tensor in made)


def test_the_second_call_ends_where_backward_needs_no_more() -> None:
    reached: list[str] = []

    def function(values: Tensor) -> Tensor:
        output = values.exp()
        reached.append("saved")
        output = output + 1
        reached.append("end")
        return output

    recomputed(function, torch.ones(4, requires_grad=True)).sum().backward()
    assert reached == ["saved", "end"]  # exp saves its result, so the second call ends in it


def test_a_function_that_saves_other_tensors_when_it_is_called_again_is_an_error() -> None:
    calls = itertools.count()

    def fewer(values: Tensor) -> Tensor:
        return values.exp() if next(calls) else values.exp().exp()

    def shorter(values: Tensor) -> Tensor:
        return values[next(calls) % 2 :].exp().sum()

    for function, message in ((fewer, "saved 2 tensors at first, and then only 1"), (shorter, "tensor 0 that a recomputed function saved")):
        calls = itertools.count()
        output = recomputed(function, torch.ones(4, requires_grad=True))
        with pytest.raises(RuntimeError, match=message):
            output.sum().backward()


def test_a_second_backward_through_the_same_graph_is_an_error() -> None:
    output = recomputed(torch.exp, torch.ones(4, requires_grad=True)).sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="for the second time"):
        output.backward()
