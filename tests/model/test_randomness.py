from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.small_gpt import loss_and_gradients, sample_batch, small_gpt

from megatron_zpp.model.block import Block

pytestmark = pytest.mark.virtual

DROPOUT: dict[str, Any] = {"attention_dropout": 0.2, "hidden_dropout": 0.2}


def test_dropout_depends_on_the_first_sample_and_not_on_history() -> None:
    model = small_gpt(**DROPOUT)
    torch.manual_seed(5)
    loss, gradients = loss_and_gradients(model, first_sample=12)
    torch.manual_seed(6)
    torch.rand(1000)
    loss_and_gradients(model, first_sample=3)
    again_loss, again = loss_and_gradients(model, first_sample=12)
    assert torch.equal(loss, again_loss)
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)
    other_loss, _ = loss_and_gradients(model, first_sample=13)
    assert not torch.equal(loss, other_loss)


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.3}, {"hidden_dropout": 0.3}])
def test_each_kind_of_dropout_is_active_by_itself_and_follows_the_seed(changes: dict[str, Any]) -> None:
    dropped, _ = loss_and_gradients(small_gpt(**changes))
    without, _ = loss_and_gradients(small_gpt())
    assert not torch.equal(dropped, without)
    reseeded = small_gpt(seed=8, **changes)
    reseeded.load_state_dict(small_gpt(**changes).state_dict())
    assert not torch.equal(dropped, loss_and_gradients(reseeded)[0])


def test_the_embedding_drops_and_scales_what_is_left() -> None:
    embedding = small_gpt(hidden_dropout=0.5).embedding
    tokens_BS, _ = sample_batch()
    dropped, other = embedding(tokens_BS, 4), embedding(tokens_BS, 5)
    kept = dropped != 0
    assert 0.4 < kept.float().mean() < 0.6
    assert torch.equal(dropped[kept], 2 * embedding.eval()(tokens_BS, 4)[kept])
    assert not torch.equal(kept, other != 0)


def test_every_block_drops_differently() -> None:
    model = small_gpt(num_layers=4, hidden_dropout=0.5)
    masks: list[torch.Tensor] = []
    for block in model.blocks:
        assert isinstance(block, Block)
        # With nothing from attention and ones from the MLP, what a block adds is its second mask.
        with torch.no_grad():
            for silenced in (*block.attention.projection.parameters(), block.mlp.down.weight):
                silenced.zero_()
            block.mlp.down.bias.fill_(1.0)
        block.register_forward_hook(lambda _module, inputs, output: masks.append((output - inputs[0]).abs() < 1e-3))
    model(*sample_batch(), first_sample=0)
    assert len(masks) == 4
    # Two independent masks of 864 fair coins agree on half of them, standard deviation 0.017.
    assert all(0.4 < mask.float().mean() < 0.6 for mask in masks)
    assert all(0.4 < masks[i].eq(masks[j]).float().mean() < 0.6 for i in range(4) for j in range(i))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_callers_generator_is_undisturbed(recompute: bool) -> None:
    model = small_gpt(recompute_granularity="full" if recompute else None, **DROPOUT)
    state = torch.get_rng_state()
    loss_and_gradients(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_drops_nothing_and_enters_no_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = loss_and_gradients(small_gpt())

    def refuse(*_: object) -> None:
        raise AssertionError("a generator was touched")

    monkeypatch.setattr("megatron_zpp.model.randomness.seeded_random", refuse)
    evaluated, _ = loss_and_gradients(small_gpt(**DROPOUT).eval())
    without_dropout, _ = loss_and_gradients(small_gpt())
    assert torch.equal(evaluated, expected)
    assert torch.equal(without_dropout, expected)
