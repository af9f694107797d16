"""The loss of a model whose samples ranks share, and the gradient of every parameter, are those of one rank with whole samples.

The ranks are threads with the model itself, the micro-batch of the loader and the loss of a step. What they leave is averaged over the
ranks that divide samples, as the engine averages it over all data ranks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from harness.context_ranks import run_ladders
from harness.rounding import gradient_tolerances
from harness.same_gpt import divided_gpt, whole_gpt
from harness.tensor_parts import MODELS, VOCAB, config_of
from torch import Tensor

from megatron_zpp.comm.links import Links
from megatron_zpp.data.loader import MicroBatch, TokenPart
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.training.step import microbatch_loss, token_losses

pytestmark = pytest.mark.virtual

CPU = torch.device("cpu")
LENGTH, FIRST_SAMPLE = 16, 5
TOLERANCE = 1e-6  # of the largest value of each gradient: sums of a few hundred fp32 products, in another order
Gradients = dict[str, Tensor]
# Runs of one document in the samples of a micro-batch. Some end where the tokens of a rank do, and some are on all ranks.
LENGTHS = {1: [1, 6, 9], 3: [5, 11, 16, 1, 3, 4, 8]}


@cache
def batch_of(samples: int, packing: str) -> MicroBatch:
    """packing: `documents`, or `positions` that count from 0 in each document, or a `mask`; with a `gap`, it leaves ranks no token."""
    text = torch.randint(VOCAB, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(samples, LENGTH)
    if "mask" in packing:
        mask = (torch.rand((samples, LENGTH), generator=torch.Generator().manual_seed(3)) < 0.6).float()
    if "gap" in packing:
        mask[:, LENGTH // 4 : LENGTH // 2] = 0.0  # all tokens of rank 1 of 4
        mask[:, LENGTH // 2 :] = 0.0  # and of rank 1 of 2
    lengths = LENGTHS[samples]
    positions = torch.cat([torch.arange(length) for length in lengths]).view(samples, LENGTH)
    return MicroBatch(
        text[:, :-1],
        text[:, 1:],
        mask,
        FIRST_SAMPLE,
        positions if "positions" in packing else None,
        torch.tensor(lengths) if "documents" in packing else None,
    )


def trained(gpt: GPT, batch: MicroBatch) -> tuple[Tensor, Gradients]:
    loss = microbatch_loss(gpt, batch, CPU)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in gpt.named_parameters() if parameter.grad is not None}


@cache
def tolerances_of(model: str, samples: int, packing: str, changes: tuple[tuple[str, Any], ...]) -> dict[str, float]:
    """Of each gradient of the whole model."""
    return gradient_tolerances(whole_gpt(model, **dict(changes)), lambda gpt: trained(gpt, batch_of(samples, packing))[1], TOLERANCE)


def on_ladder(links: Links, model: str, whole: GPT, *, sequence_parallel: bool, **changes: Any) -> GPT:
    tensor = None if links.tensor_link is None else TensorParallel(links.tensor_link, sequence_parallel)
    return divided_gpt(model, whole, tensor, links.context_link, **changes)


def part_of(links: Links, batch: MicroBatch) -> MicroBatch:
    grid = links.grid
    return batch.keeping(TokenPart(grid.context_rank_of(links.backend.rank), grid.context_ranks))


def compare(
    model: str, tensor_ranks: int, context_ranks: int, samples: int, packing: str, *, sequence_parallel: bool, **changes: Any
) -> None:
    """With the same number of tensor ranks; tests/model/test_tensor_parallel_gradients.py compares these with the whole model."""
    whole, batch = whole_gpt(model, **changes), batch_of(samples, packing)
    tolerances = tolerances_of(model, samples, packing, tuple(changes.items()))

    def on_rank(links: Links) -> tuple[Tensor, Gradients]:
        return trained(on_ladder(links, model, whole, sequence_parallel=sequence_parallel, **changes), part_of(links, batch))

    expected, found = (run_ladders(Grid.of_nodes(1, tensor_ranks * ranks, tensor_ranks, ranks), on_rank) for ranks in (1, context_ranks))
    for expected_loss, loss in zip(mean_losses(expected, tensor_ranks), mean_losses(found, tensor_ranks), strict=True):
        torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=0.0)
    shapes = [ModelShape(config_of(model, **changes), VOCAB, tensor_ranks, rank, sequence_parallel) for rank in range(tensor_ranks)]
    gradients = mean_gradients(found, shapes)
    for name, gradient in mean_gradients(expected, shapes).items():
        assert (gradients[name] - gradient).abs().max() <= tolerances[name] * gradient.abs().max(), name


def mean_losses(of_ranks: list[tuple[Tensor, Gradients]], tensor_ranks: int) -> list[Tensor]:
    """Over the ranks that divide samples, for each tensor rank."""
    return [torch.stack([loss for loss, _ in of_ranks[tensor_rank::tensor_ranks]]).mean() for tensor_rank in range(tensor_ranks)]


def mean_gradients(of_ranks: list[tuple[Tensor, Gradients]], shapes: list[ModelShape]) -> Gradients:
    """Of all tensor ranks, [T, numel], each a mean over ranks that divide samples; of elements that several have, the sum over these."""
    own = [gradients for _, gradients in of_ranks]
    means = {name: torch.stack([of_rank[name].flatten() for of_rank in own]).unflatten(0, (-1, len(shapes))).mean(0) for name in own[0]}
    summed = {name: mean.clone() for name, mean in means.items()}
    for rank, shape in enumerate(shapes):
        for spec in (spec for unit in shape.unit_specs() for spec in unit.params):
            for shared in spec.shared:
                elements = slice(shared.start, shared.stop)
                summed[spec.name][rank, elements] = means[spec.name][list(shared.holders), elements].sum(0)
    return summed


GRIDS = [(1, 2, False), (1, 4, False), (2, 2, True), (2, 2, False), (2, 4, True)]


# Every grid with two models, every model with at least two grids.
@pytest.mark.parametrize(
    "model, tensor_ranks, context_ranks, sequence_parallel",
    [(list(MODELS)[(2 * index + index // 2 + turn) % len(MODELS)], *grid) for index, grid in enumerate(GRIDS) for turn in (0, 1)],
)
def test_every_gradient_is_that_of_whole_samples(model: str, tensor_ranks: int, context_ranks: int, sequence_parallel: bool) -> None:
    compare(model, tensor_ranks, context_ranks, 3, "mask", sequence_parallel=sequence_parallel)


# Pairs of what a run can switch on. Every mode of recomputation has a case without and with tensor ranks.
SETTINGS: list[tuple[str, int, int, bool, int, str, dict[str, Any]]] = [
    ("GPT-2", 1, 2, False, 3, "documents, mask", {"recompute_granularity": "selective", "loss_chunk_tokens": 7}),
    ("GPT-2", 1, 4, False, 1, "documents, positions, gap", {"recompute_granularity": "full", "hidden_dropout": 0.2}),
    ("GPT-2", 2, 4, True, 3, "positions, mask", {"recompute_granularity": "full", "recompute_num_layers": 2, "loss_chunk_tokens": 5}),
    ("Llama 3", 1, 4, False, 3, "documents, positions, gap", {"hidden_dropout": 0.2, "loss_chunk_tokens": 3}),
    ("Llama 3", 2, 2, True, 3, "documents, gap", {"recompute_granularity": "selective", "hidden_dropout": 0.2}),
    ("Llama 3", 2, 4, False, 1, "positions, gap", {"recompute_granularity": "full", "recompute_method": "block", "hidden_dropout": 0.2}),
    ("Qwen3, tied", 2, 2, False, 3, "documents, mask", {"hidden_dropout": 0.2, "loss_chunk_tokens": 11}),
    ("Qwen3, tied", 1, 2, False, 1, "gap", {"recompute_granularity": "full", "recompute_num_layers": 2}),
    ("one key head, every bias", 1, 4, False, 3, "documents, positions", {"recompute_granularity": "selective", "hidden_dropout": 0.1}),
]


@pytest.mark.parametrize("model, tensor_ranks, context_ranks, sequence_parallel, samples, packing, changes", SETTINGS, ids=str)
def test_every_gradient_is_that_of_whole_samples_with_documents_gaps_dropout_recomputation_and_loss_in_chunks(
    model: str, tensor_ranks: int, context_ranks: int, sequence_parallel: bool, samples: int, packing: str, changes: dict[str, Any]
) -> None:
    compare(model, tensor_ranks, context_ranks, samples, packing, sequence_parallel=sequence_parallel, **changes)


def test_a_micro_batch_of_which_no_token_counts_has_the_loss_0_on_every_rank_and_no_gradient() -> None:
    whole, batch = whole_gpt("GPT-2"), batch_of(1, "")
    nothing_counts = MicroBatch(batch.tokens, batch.labels, torch.zeros_like(batch.loss_mask), 0)

    def on_rank(links: Links) -> tuple[Tensor, Gradients]:
        return trained(on_ladder(links, "GPT-2", whole, sequence_parallel=False), part_of(links, nothing_counts))

    for loss, gradients in run_ladders(Grid.of_nodes(1, 2, 1, 2), on_rank):
        assert loss == 0.0 and not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("model", ["GPT-2", "Llama 3"])
def test_the_losses_of_an_evaluation_are_those_of_whole_samples_token_by_token(model: str) -> None:
    changes = {"recompute_granularity": "full", "hidden_dropout": 0.2}
    whole, batch = whole_gpt(model, **changes).eval(), batch_of(3, "documents, positions, mask")
    with torch.no_grad():
        expected, mask = token_losses(whole, batch, CPU)

    def on_rank(links: Links) -> tuple[Tensor, Tensor]:
        gpt = on_ladder(links, model, whole, sequence_parallel=True, **changes).eval()
        with torch.no_grad():
            return token_losses(gpt, part_of(links, batch), CPU)

    found = run_ladders(Grid.of_nodes(1, 8, 2, 4), on_rank)[::2]
    torch.testing.assert_close(torch.cat([losses for losses, _ in found], dim=1), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cat([own for _, own in found], dim=1), mask)
