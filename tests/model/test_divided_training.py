"""Training of a GPT that tensor ranks share, through the engine: the losses of one tensor rank, and the same bits at every stage."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from harness.tensor_parts import VOCAB, config_of
from harness.worlds import TurnLanes, run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Ladder
from megatron_zpp.model.gpt import GPT
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES, Policy, with_secondary_weights
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

CPU = torch.device("cpu")
STEPS, SAMPLES, LENGTH = 20, 3, 12
LEARNING_RATE, CLIP_GRAD = 1e-3, 1.0  # as in tests/integration/test_loss_bits.py, which says why not more
TWO_TIMES_TWO, ONE_TIMES_FOUR = Grid.of_nodes(1, 4, 2), Grid.of_nodes(1, 4, 4)  # data ranks, tensor ranks
ROWS = {"stage 0": POLICIES[0], "stage 2": POLICIES[2], "stage 3": POLICIES[3], "hpZ": with_secondary_weights(POLICIES[3])}
History = tuple[tuple[float, float], ...]


def trained(
    model: str,
    sequence_parallel: bool,
    policy: Policy,
    prefetch: Prefetch,
    dtype: torch.dtype,
    steps: int,
    changes: dict[str, Any],
    backend: VirtualBackend,
) -> History:
    """This rank's mean loss and the gradient norm, per step."""
    ladder = Ladder(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU)
    tensor = None if ladder.tensor_link is None else TensorParallel(ladder.tensor_link, sequence_parallel)
    gpt = GPT(config_of(model, **changes), VOCAB, 1234, dtype, tensor)
    options = EngineOptions(policy, dtype, 32, prefetch, AdamOptions(), CLIP_GRAD)
    engine = ZeroEngine(gpt, gpt.unit_specs(), gpt.uses(), options, ladder)
    data_ranks = backend.grid.data_ranks
    generator, history = torch.Generator().manual_seed(4), []
    for step in range(steps):
        text = torch.randint(VOCAB, (data_ranks, SAMPLES, LENGTH + 1), generator=generator)[ladder.data_rank]
        first_sample = (step * data_ranks + ladder.data_rank) * SAMPLES
        loss = gpt(text[:, :-1], text[:, 1:], first_sample=first_sample).mean()
        engine.backward(loss, microbatches=1, is_last_microbatch=True)
        history.append((loss.item(), engine.step(LEARNING_RATE).grad_norm))
    engine.close()
    return tuple(history)


def history_of(
    model: str,
    grid: Grid,
    *,
    sequence_parallel: bool = False,
    policy: Policy = POLICIES[3],
    prefetch: Prefetch = Prefetch(),
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    **changes: Any,
) -> tuple[list[float], list[float]]:
    """Losses of the global batch and gradient norms, per step. Ranks with the same samples have the same."""
    histories = run_world(grid, partial(trained, model, sequence_parallel, policy, prefetch, dtype, steps, changes))
    of_data_ranks = [histories[grid.rank_of(data_rank, 0)] for data_rank in range(grid.data_ranks)]
    assert histories == [of_data_ranks[grid.data_rank_of(rank)] for rank in range(grid.world_size)]
    losses = [sum(loss for loss, _ in of_step) / grid.data_ranks for of_step in zip(*of_data_ranks, strict=True)]
    return losses, [norm for _, norm in histories[0]]


@cache
def of_one_tensor_rank(model: str, data_ranks: int, hidden_dropout: float) -> tuple[list[float], list[float]]:
    return history_of(model, Grid.of_nodes(1, data_ranks), hidden_dropout=hidden_dropout)


@pytest.mark.parametrize(
    ("model", "grid", "sequence_parallel", "hidden_dropout", "changes"),
    [
        ("GPT-2", TWO_TIMES_TWO, False, 0.1, {}),
        ("GPT-2", ONE_TIMES_FOUR, True, 0.1, {"recompute_granularity": "full", "loss_chunk_tokens": 8}),
        ("Llama 3", ONE_TIMES_FOUR, False, 0.0, {"recompute_granularity": "selective"}),  # 2 groups
        ("Qwen3, tied", TWO_TIMES_TWO, True, 0.1, {}),
    ],
    ids=str,
)
def test_losses_and_norms_are_those_of_one_tensor_rank(
    model: str, grid: Grid, sequence_parallel: bool, hidden_dropout: float, changes: dict[str, Any]
) -> None:
    losses, norms = history_of(model, grid, sequence_parallel=sequence_parallel, hidden_dropout=hidden_dropout, **changes)
    expected_losses, expected_norms = of_one_tensor_rank(model, grid.data_ranks, hidden_dropout)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=2e-5)  # fp32 sums of gradients, as in tests/zero/test_same_bits.py


@pytest.mark.parametrize(
    ("model", "sequence_parallel", "dtype"),
    [("GPT-2", True, torch.float32), ("Qwen3, tied", False, torch.float32), ("Llama 3", True, torch.bfloat16)],
    ids=str,
)
def test_bits_depend_on_neither_stage_nor_prefetch_nor_recomputation(model: str, sequence_parallel: bool, dtype: torch.dtype) -> None:
    run = partial(history_of, model, TWO_TIMES_TWO, sequence_parallel=sequence_parallel, dtype=dtype, steps=4, hidden_dropout=0.1)
    expected = run(policy=ROWS["stage 0"])
    assert run(policy=ROWS["stage 2"], recompute_granularity="selective") == expected
    assert run(policy=ROWS["stage 3"], recompute_granularity="full", prefetch=Prefetch(0, 0)) == expected
    assert run(policy=ROWS["hpZ"], recompute_granularity="full", recompute_num_layers=2, prefetch=Prefetch(3, 2)) == expected
