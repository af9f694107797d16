"""What backward leaves on each holder of a shared element is what the table of model/divisions.py says, for every parameter.

The ranks are emulated in one process, by code that knows no table.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from harness.emulated_tensor_ranks import EmulatedRanks
from harness.tensor_parts import MODELS, VOCAB, check_gradients, config_of, part_of
from torch import Tensor

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT, materialize

TOKENS = 16
# Of the largest gradient of a parameter. Sums over ranks are taken in another order, in fp64: 1e-16 times a few hundred additions and
# cancellations of a few hundred. The real model takes statistics and losses in fp32: 6e-8 times as much.
TOLERANCE, REAL_TOLERANCE = 1e-11, 1e-5


def config_of_one_block(model: str) -> ModelConfig:
    return config_of(model, seq_length=TOKENS, max_position_embeddings=TOKENS, num_layers=1)


def real_model(model: str) -> GPT:
    gpt = materialize(GPT(config_of_one_block(model), VOCAB, 7, torch.float64))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator), alpha=0.2)
    return gpt


def emulated(model: str, ranks: int, *, sequence_parallel: bool = False) -> tuple[float, list[dict[str, Tensor]]]:
    """The loss, and the gradients of each rank's parts by name."""
    config = config_of_one_block(model)
    weights = {name: parameter.detach() for name, parameter in real_model(model).named_parameters()}
    leaves = [
        {name: part_of(name, whole, config, ranks, rank).clone().requires_grad_() for name, whole in weights.items()}
        for rank in range(ranks)
    ]
    loss = EmulatedRanks(config, leaves, sequence_parallel=sequence_parallel).backward(*sample())
    return loss.item(), [{name: grad_of(leaf) for name, leaf in own.items()} for own in leaves]


whole_model = cache(partial(emulated, ranks=1))


def sample() -> tuple[Tensor, Tensor]:
    text = torch.randint(VOCAB, (TOKENS + 1,), generator=torch.Generator().manual_seed(2))
    return text[:-1], text[1:]


@pytest.mark.parametrize("model", list(MODELS))
def test_one_emulated_rank_is_the_real_model(model: str) -> None:
    loss, (gradients,) = whole_model(model)
    gpt = real_model(model)
    real_loss = gpt(*(ids[None] for ids in sample()), first_sample=0).mean()
    real_loss.backward()
    assert loss == pytest.approx(real_loss.item(), rel=REAL_TOLERANCE)
    assert all(close(gradients[name], grad_of(parameter), REAL_TOLERANCE) for name, parameter in gpt.named_parameters())


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tokens of all", "own tokens"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("model", list(MODELS))
def test_holders_have_the_whole_gradient_or_parts_that_add_up_to_it_as_the_table_says(
    model: str, ranks: int, sequence_parallel: bool
) -> None:
    config = config_of_one_block(model)
    whole_loss, (whole,) = whole_model(model)
    loss, gradients = emulated(model, ranks, sequence_parallel=sequence_parallel)
    assert loss == pytest.approx(whole_loss, rel=TOLERANCE)
    check_gradients(config, whole, gradients, sequence_parallel=sequence_parallel, tolerances=dict.fromkeys(whole, TOLERANCE))


def grad_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())
