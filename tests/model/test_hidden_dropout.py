"""What hidden dropout drops of a sample does not depend on how the run is divided: into micro-batches, ranks, stages or recomputations."""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from harness.small_gpt import ARCHITECTURES, VOCAB, sample_batch, small_config, small_gpt
from harness.worlds import TurnLanes, run_world
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.data.sampler import MicroBatchSampler
from megatron_zpp.model.gpt import GPT
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

CPU = torch.device("cpu")
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.0}
STEPS, GLOBAL_BATCH, LENGTH = 4, 24, 12
LEARNING_RATE = 1e-3  # as in tests/integration/test_loss_bits.py, which says why not more
CLIP_GRAD = 1.0


@cache
def run_of_samples() -> Tensor:
    return torch.randint(VOCAB, (STEPS * GLOBAL_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(4))


def trained(backend: VirtualBackend, micro_batch_size: int, stage: int, **changes: Any) -> list[tuple[float, float]]:
    """This rank's mean loss and the gradient norm, per step."""
    model = GPT(small_config(**DROPOUT | changes), VOCAB, 1234, torch.float32)
    options = EngineOptions(POLICIES[stage], torch.float32, 32, Prefetch(), AdamOptions(), CLIP_GRAD)
    links = Links(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU)
    engine = ZeroEngine(model, model.unit_specs(), model.uses(), options, links)
    data_ranks = backend.grid.data_ranks
    batches = iter(MicroBatchSampler(STEPS * GLOBAL_BATCH, 0, micro_batch_size, links.data_rank, data_ranks))
    microbatches, history = GLOBAL_BATCH // (data_ranks * micro_batch_size), []
    for _ in range(STEPS):
        total = 0.0
        for index, batch in enumerate(islice(batches, microbatches)):
            text = run_of_samples()[list(batch.samples)]
            loss = model(text[:, :-1], text[:, 1:], first_sample=batch.first_sample).mean()
            engine.backward(loss, microbatches=microbatches, is_last_microbatch=index == microbatches - 1)
            total += loss.item() / microbatches
        history.append((total, engine.step(LEARNING_RATE).grad_norm))
    engine.close()
    return history


def history_of(
    world: tuple[int, int], micro_batch_size: int, stage: int, *, takes_turns: bool = True, **changes: Any
) -> tuple[list[float], list[float]]:
    """Losses of the global batch and gradient norms, per step."""
    histories = run_world(world, lambda backend: trained(backend, micro_batch_size, stage, **changes), takes_turns=takes_turns)
    losses = [sum(loss for loss, _ in of_ranks) / len(of_ranks) for of_ranks in zip(*histories, strict=True)]
    return losses, [norm for _, norm in histories[0]]


@cache
def whole_batches() -> tuple[list[float], list[float]]:
    return history_of((1, 1), GLOBAL_BATCH, 0)


# Pairs of micro-batch size, world and stage; one world whose threads all run at once, as they may: there is no generator to share.
@pytest.mark.parametrize(
    ("world", "micro_batch_size", "stage", "takes_turns", "changes"),
    [
        ((1, 1), 4, 3, True, {}),
        ((1, 1), 12, 2, True, {}),
        ((2, 2), 1, 3, False, {"recompute_granularity": "full", "recompute_num_layers": 2}),
        ((3, 2), 4, 1, True, {"recompute_granularity": "full"}),
        ((4, 1), 2, 0, True, {}),
    ],
    ids=str,
)
def test_losses_agree_within_fp32_rounding_over_micro_batch_sizes_worlds_stages_and_recomputations(
    world: tuple[int, int], micro_batch_size: int, stage: int, takes_turns: bool, changes: dict[str, Any]
) -> None:
    losses, norms = history_of(world, micro_batch_size, stage, takes_turns=takes_turns, **changes)
    expected_losses, expected_norms = whole_batches()
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=2e-5)  # fp32 sums of gradients, as in tests/zero/test_same_bits.py


def test_without_dropout_every_loss_is_farther_away_than_rounding() -> None:
    without, _ = history_of((1, 1), 12, 0, hidden_dropout=0.0)
    expected, _ = whole_batches()
    assert min(abs(loss / other - 1) for loss, other in zip(without, expected, strict=True)) > 1e-5


@pytest.mark.parametrize("architecture", ["GPT-2", "Qwen3"])
def test_a_sample_has_the_same_loss_alone_and_in_a_batch(architecture: str) -> None:
    tokens_BS, labels_BS = sample_batch(samples=4)
    model = small_gpt(**DROPOUT | ARCHITECTURES[architecture])
    together = model(tokens_BS, labels_BS, first_sample=8)
    alone = torch.cat([model(tokens_BS[i : i + 1], labels_BS[i : i + 1], first_sample=8 + i) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)  # matrix products of other shapes; a mask moves it by 1e-2
    other = model(tokens_BS, labels_BS, first_sample=9)
    assert (other - together).abs().amax(dim=1).min() > 1e-2


@pytest.mark.parametrize("recomputed", [{}, {"recompute_granularity": "selective"}], ids=["kept", "attention recomputed"])
def test_compiled_blocks_drop_the_same_with_one_compilation_for_all_blocks_and_samples(recomputed: dict[str, Any]) -> None:
    """Attention drops too, and may be computed again inside a compiled block.

    On a backend that only traces; tests/integration/test_compiled_blocks.py has the kernels.
    """
    compilations: list[object] = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compilations.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    plain, compiled = (small_gpt(**DROPOUT | {"attention_dropout": 0.1} | changes) for changes in ({}, recomputed))
    for block in compiled.blocks:
        block.transformed = torch.compile(block.transformed, dynamic=False, fullgraph=True, backend=counted)
    for first_sample in (0, 3, 2**40):
        losses = [model(*sample_batch(), first_sample=first_sample) for model in (plain, compiled)]
        for loss in losses:
            loss.sum().backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for (name, expected), (_, found) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert len(compilations) == 1
