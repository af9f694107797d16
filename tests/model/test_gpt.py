from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.small_gpt import ARCHITECTURES, VOCAB, loss_and_gradients, sample_batch, small_config, small_gpt
from torch import Tensor

from megatron_zpp.model.gpt import GPT, materialize


@pytest.mark.parametrize("untied", [False, True])
def test_a_new_model_knows_nothing(untied: bool) -> None:
    model = materialize(GPT(small_config(untie_embeddings_and_output_weights=untied), VOCAB, 3, torch.float32))
    loss_BS = model(*sample_batch(samples=20), first_sample=0)
    # logits of a new model have a standard deviation of about 0.02 sqrt(H) = 0.1, which moves the mean loss by its square / 2.
    assert loss_BS.mean().item() == pytest.approx(math.log(VOCAB), abs=0.03)


def test_a_later_token_never_changes_earlier_logits() -> None:
    model = small_gpt()
    tokens_BS, _ = sample_batch()
    before = model(tokens_BS, None, first_sample=0)
    for position in range(1, tokens_BS.shape[1]):
        changed = tokens_BS.clone()
        changed[:, position] = (changed[:, position] + 1) % VOCAB
        after = model(changed, None, first_sample=0)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position:], after[:, position:])


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = small_gpt()
    tokens_BS, labels_BS = sample_batch()
    logits_BSV = model(tokens_BS, None, first_sample=0)
    expected_BS = logits_BSV.logsumexp(-1) - logits_BSV.gather(-1, labels_BS[..., None])[..., 0]
    torch.testing.assert_close(model(tokens_BS, labels_BS, first_sample=0), expected_BS)


def test_a_tied_gradient_is_the_sum_of_both_uses() -> None:
    tied, untied = small_gpt(), small_gpt(untie_embeddings_and_output_weights=True)
    parameters = dict(tied.named_parameters())
    with torch.no_grad():
        for name, parameter in untied.named_parameters():
            parameter.copy_(parameters["embedding.word.weight" if name == "final.head.weight" else name])
    _, together = loss_and_gradients(tied)
    _, apart = loss_and_gradients(untied)
    assert torch.equal(together["embedding.word.weight"], apart["embedding.word.weight"] + apart["final.head.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_parameters_have_the_models_dtype_and_the_loss_is_fp32(dtype: torch.dtype) -> None:
    model = small_gpt(dtype=dtype, untie_embeddings_and_output_weights=True)
    tokens_BS, _ = sample_batch()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(tokens_BS, None, first_sample=0).dtype == dtype
    loss_BS, gradients = loss_and_gradients(model)
    assert loss_BS.dtype == torch.float32
    assert {gradient.dtype for gradient in gradients.values()} == {dtype}


def test_a_sample_longer_than_the_positions_is_refused() -> None:
    tokens_BS, labels_BS = sample_batch(length=17)
    with pytest.raises(RuntimeError, match="17 tokens .* 16 positions"):
        small_gpt()(tokens_BS, labels_BS, first_sample=0)


def test_building_a_model_takes_no_storage_and_no_random_numbers() -> None:
    state = torch.get_rng_state()
    model = GPT(small_config(), VOCAB, 7, torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("untied", [False, True])
def test_units_hold_every_parameter_exactly_once(untied: bool) -> None:
    model = GPT(small_config(untie_embeddings_and_output_weights=untied), VOCAB, 7, torch.float32)
    specs = [spec for unit in model.unit_specs() for spec in unit.params]
    assert [unit.name for unit in model.unit_specs()] == ["embedding", "block.0", "block.1", "final_norm"] + ["head"] * untied
    assert sorted(spec.name for spec in specs) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
    for spec in specs:
        assert spec.shape == tuple(model.get_parameter(spec.name).shape)
        assert spec.weight_decay == (len(spec.shape) >= 2)


@pytest.mark.parametrize("untied", [False, True])
def test_uses_are_the_module_calls_in_order_and_read_every_unit(untied: bool) -> None:
    model = small_gpt(untie_embeddings_and_output_weights=untied)
    calls: list[str] = []
    for use in model.uses():
        model.get_submodule(use.module).register_forward_pre_hook(lambda *_, module=use.module: calls.append(module))
    model(*sample_batch(), first_sample=0)
    assert calls == [use.module for use in model.uses()] == ["embedding", "blocks.0", "blocks.1", "final"]
    assert {unit for use in model.uses() for unit in use.units} == {unit.name for unit in model.unit_specs()}
    assert model.uses()[-1].units == ("final_norm", "head" if untied else "embedding")


class Rungs:
    """Removes every weight, except while a use that declares it runs its forward or, if it needs weights there, its backward.

    Removed means: the buffer under the parameter is NaN, and the parameter shows a NaN of its own.
    """

    def __init__(self, model: GPT) -> None:
        names = {unit.name: [spec.name for spec in unit.params] for unit in model.unit_specs()}
        self.buffers = {name: model.get_parameter(name).data for unit in names.values() for name in unit}
        self.values = {name: buffer.clone() for name, buffer in self.buffers.items()}
        self.leaves = {name: torch.nn.Parameter(torch.empty(0)) for name in self.buffers}
        for name, leaf in self.leaves.items():
            owner_path, attribute = name.rsplit(".", 1)
            setattr(model.get_submodule(owner_path), attribute, leaf)
        for use in model.uses():
            self.bracket(
                model.get_submodule(use.module), [name for unit in use.units for name in names[unit]], use.needs_weights_in_backward
            )
        self.keep_only([])

    def bracket(self, module: torch.nn.Module, names: list[str], needs_weights_in_backward: bool) -> None:
        def post_forward(_module: Any, _inputs: Any, output: Tensor) -> None:
            self.keep_only([])
            if output.requires_grad:
                output.register_hook(lambda _gradient: self.keep_only(names if needs_weights_in_backward else []))

        module.register_forward_pre_hook(lambda *_: self.keep_only(names))
        module.register_forward_hook(post_forward)

    def keep_only(self, names: list[str]) -> None:
        for name, buffer in self.buffers.items():
            if name in names:
                buffer.copy_(self.values[name])
                self.leaves[name].data = buffer
            else:
                buffer.fill_(math.nan)
                self.leaves[name].data = torch.tensor(math.nan).expand(buffer.shape)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_weights_may_be_gone_outside_of_their_uses(architecture: str, recompute: str | None) -> None:
    changes: dict[str, Any] = {**ARCHITECTURES[architecture], "recompute_granularity": recompute, "hidden_dropout": 0.2}
    model = small_gpt(**changes)
    expected_loss, expected_gradients = loss_and_gradients(model)
    Rungs(model)
    loss, gradients = loss_and_gradients(model)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected_gradients.keys()
    assert all(torch.equal(gradient, expected_gradients[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_kept_for_backward_is_a_copy_of_a_weight(dtype: torch.dtype, architecture: str) -> None:
    model = small_gpt(dtype=dtype, **ARCHITECTURES[architecture])
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # 2 samples of 11 tokens: no activation of this batch has as many elements as a matrix of the model.
    matrix_numels = {parameter.numel() for parameter in model.parameters() if parameter.ndim == 2}
    aliases, copies = 0, []

    def pack(kept: Tensor) -> Tensor:
        nonlocal aliases
        aliases += kept.untyped_storage().data_ptr() in storages
        if kept.numel() in matrix_numels and kept.untyped_storage().data_ptr() not in storages:
            copies.append(kept.shape)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        model(*sample_batch(samples=2, length=11), first_sample=0)
    assert copies == []
    assert aliases >= 4 * model.config.num_layers + 1
