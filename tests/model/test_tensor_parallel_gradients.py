"""The loss of a model that tensor ranks share, and the gradient of every parameter, are those of the whole model.

The ranks are threads with the model itself; its shared elements are compared as model/divisions.py says.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from harness.rounding import gradient_tolerances
from harness.same_gpt import divided_gpt, whole_gpt
from harness.tensor_parts import MODELS, VOCAB, check_gradients, config_of
from harness.tensor_ranks import run_tensor_ranks
from torch import Tensor

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tensor_parallel.context import TensorParallel

pytestmark = pytest.mark.virtual

SAMPLES, LENGTH, FIRST_SAMPLE = 3, 12, 5  # with sequence parallelism and T = 4, a rank has 9 tokens: of one sample or of two
TOLERANCE = 1e-6  # of the largest value of each gradient: sums of a few hundred fp32 products, in another order
Inputs = dict[str, Tensor]


@cache
def inputs(samples: int, packing: str) -> Inputs:
    """Tokens and labels; with documents, or position ids that count from 0 in each document."""
    text = torch.randint(VOCAB, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    batch = {"tokens_BQ": text[:, :-1], "labels_BQ": text[:, 1:]}
    lengths = [5, 7, 12, 1, 2, 9][: 2 if samples == 1 else 6]
    if "documents" in packing:
        batch["document_lengths_R"] = torch.tensor(lengths)
    if "positions" in packing:
        batch["position_ids_BS"] = torch.cat([torch.arange(length) for length in lengths]).view(samples, LENGTH)
    return batch


@cache
def tolerances_of(model: str, samples: int, packing: str, changes: tuple[tuple[str, Any], ...]) -> dict[str, float]:
    """Of each gradient of the whole model."""
    return gradient_tolerances(whole_gpt(model, **dict(changes)), lambda gpt: trained(gpt, inputs(samples, packing))[1], TOLERANCE)


def trained(gpt: GPT, batch: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss per token, and the gradients of a mean in which tokens have different weights."""
    loss_BS = gpt(**batch, first_sample=FIRST_SAMPLE)
    (loss_BS * torch.linspace(0.5, 1.5, loss_BS.numel()).view(loss_BS.shape)).mean().backward()
    return loss_BS.detach(), {name: parameter.grad for name, parameter in gpt.named_parameters() if parameter.grad is not None}


def compare(model: str, ranks: int, samples: int, packing: str, *, sequence_parallel: bool, **changes: Any) -> None:
    whole, batch = whole_gpt(model, **changes), inputs(samples, packing)

    def on_rank(link: TensorLink) -> tuple[Tensor, dict[str, Tensor]]:
        return trained(divided_gpt(model, whole, TensorParallel(link, sequence_parallel), **changes), batch)

    of_ranks = run_tensor_ranks(ranks, on_rank)
    tolerances = tolerances_of(model, samples, packing, tuple(changes.items()))
    expected_loss, expected = trained(whole, batch)
    assert all(torch.equal(loss, of_ranks[0][0]) for loss, _ in of_ranks)
    torch.testing.assert_close(of_ranks[0][0], expected_loss, rtol=TOLERANCE, atol=TOLERANCE)
    gradients = [of_rank for _, of_rank in of_ranks]
    check_gradients(config_of(model, **changes), expected, gradients, sequence_parallel=sequence_parallel, tolerances=tolerances)


both_token_orders = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all tokens", "own tokens"])


@pytest.mark.parametrize(
    "model, ranks, sequence_parallel",
    [(model, ranks, (index + ranks // 2) % 2 == 0) for index, model in enumerate(MODELS) for ranks in (2, 4)],
)
def test_every_gradient_is_the_whole_models(model: str, ranks: int, sequence_parallel: bool) -> None:
    compare(model, ranks, SAMPLES, "", sequence_parallel=sequence_parallel)


# Pairs of what a run can switch on.
SETTINGS: list[tuple[str, int, int, str, dict[str, Any]]] = [
    ("GPT-2", 2, 3, "documents", {"recompute_granularity": "selective", "loss_chunk_tokens": 7}),
    ("GPT-2", 4, 1, "documents, positions", {"recompute_granularity": "full", "hidden_dropout": 0.2}),
    ("GPT-2", 4, 3, "positions", {"recompute_granularity": "full", "recompute_num_layers": 2, "loss_chunk_tokens": 16}),
    ("Llama 3", 2, 1, "positions", {"hidden_dropout": 0.2, "loss_chunk_tokens": 5}),
    ("Llama 3", 4, 3, "documents, positions", {"recompute_granularity": "full", "recompute_method": "block", "hidden_dropout": 0.2}),
    ("Qwen3, tied", 4, 3, "documents", {"recompute_granularity": "selective", "hidden_dropout": 0.2}),
    ("Qwen3, tied", 2, 1, "", {"recompute_granularity": "full", "recompute_num_layers": 2, "loss_chunk_tokens": 11}),
    ("one key head, every bias", 4, 1, "documents", {"loss_chunk_tokens": 5, "apply_layernorm_1p": True}),
]


@pytest.mark.parametrize(
    ("model", "ranks", "samples", "packing", "changes", "sequence_parallel"),
    [(*setting, index % 2 == 0) for index, setting in enumerate(SETTINGS)],
    ids=str,
)
def test_every_gradient_is_the_whole_models_with_documents_dropout_recomputation_and_loss_in_chunks(
    model: str, ranks: int, samples: int, packing: str, changes: dict[str, Any], sequence_parallel: bool
) -> None:
    compare(model, ranks, samples, packing, sequence_parallel=sequence_parallel, **changes)


@both_token_orders
def test_without_labels_every_rank_has_the_whole_models_logits(sequence_parallel: bool) -> None:
    whole, batch = whole_gpt("Llama 3"), inputs(SAMPLES, "") | {"labels_BQ": None}
    expected = whole(**batch, first_sample=0)

    def on_rank(link: TensorLink) -> Tensor:
        logits: Tensor = divided_gpt("Llama 3", whole, TensorParallel(link, sequence_parallel))(**batch, first_sample=0)
        return logits.detach()

    for logits in run_tensor_ranks(2, on_rank):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


# What acts on hidden states between the layers: its gradient is a sum over tokens, with sequence parallelism over own tokens first.
BETWEEN_LAYERS = ("attention_norm", "mlp_norm", "final.norm", "projection.bias", "down.bias")


@pytest.mark.parametrize(
    ("model", "ranks", "dtype", "changes"),
    [
        ("GPT-2", 2, torch.float32, {"hidden_dropout": 0.2}),
        ("GPT-2", 4, torch.bfloat16, {"loss_chunk_tokens": 7}),
        ("Llama 3", 4, torch.float32, {"recompute_granularity": "full"}),
        ("Qwen3, tied", 2, torch.bfloat16, {"hidden_dropout": 0.2, "recompute_granularity": "selective"}),
    ],
    ids=str,
)
def test_sequence_parallelism_changes_no_bit_but_in_gradients_of_norms_and_biases_between_the_layers(
    model: str, ranks: int, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    whole = whole_gpt(model, **changes).to(dtype)

    def on_rank(link: TensorLink) -> list[tuple[Tensor, dict[str, Tensor]]]:
        return [
            trained(divided_gpt(model, whole, TensorParallel(link, divides), **changes), inputs(SAMPLES, "")) for divides in (False, True)
        ]

    for (loss, gradients), (own_loss, own_gradients) in run_tensor_ranks(ranks, on_rank):
        assert torch.equal(own_loss, loss)
        different = {name for name in gradients if not torch.equal(own_gradients[name], gradients[name])}
        assert different == {name for name in gradients if any(module in name for module in BETWEEN_LAYERS)}
