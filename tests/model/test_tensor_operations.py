"""The operations of the tensor link in one micro-batch: how many, in which order, and that every rank makes the same."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from harness.recorded_link import Operation, RecordedLink
from harness.tensor_parts import VOCAB, config_of
from harness.tensor_ranks import run_tensor_ranks

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.tensor_parallel.context import TensorParallel

pytestmark = pytest.mark.virtual

LAYERS, SAMPLES, LENGTH = 4, 3, 12
FULL = {"recompute_granularity": "full"}
# Of one half of a block, in forward and in backward.
HALF = {False: (["summed"], ["start_summed"]), True: (["gather", "sum_scattered"], ["gather", "start_gather", "start_sum_scattered"])}


def operations(ranks: int, *, sequence_parallel: bool, trains: bool = True, **changes: Any) -> tuple[list[str], list[str]]:
    """The names of those in forward, and of those in backward."""
    text = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(2))

    def on_rank(link: TensorLink) -> tuple[list[Operation], list[Operation]]:
        made: list[Operation] = []
        tensor = TensorParallel(cast(TensorLink, RecordedLink(link, made.append)), sequence_parallel)
        gpt = materialize(GPT(config_of("Llama 3", num_layers=LAYERS, **changes), VOCAB, 7, torch.float32, tensor)).train(trains)
        with torch.set_grad_enabled(trains):
            loss = gpt(text[:, :-1], text[:, 1:], first_sample=0).mean()
        in_forward = len(made)
        if trains:
            loss.backward()
        return made[:in_forward], made[in_forward:]

    first, *others = run_tensor_ranks(ranks, on_rank)
    assert all(other == first for other in others)
    forward, backward = ([name for name, _ in part if name != "wait"] for part in first)
    return forward, backward


def forward_of(sequence_parallel: bool) -> list[str]:
    half, _ = HALF[sequence_parallel]
    return [half[-1], *2 * LAYERS * half, *half[:-1], "gather"]  # the last are of the head's input and of the loss


def backward_of(sequence_parallel: bool, again: list[list[str]]) -> list[str]:
    """again: what is repeated in the backward of each block, from the last to the first, when it comes to the last linear layer."""
    forward, half = HALF[sequence_parallel]
    behind_layer = 1 if sequence_parallel else 0
    block = 2 * half
    blocks = [name for repeated in again for name in [*block[:behind_layer], *repeated, *block[behind_layer:]]]
    return [forward[-1], *blocks, *(["gather"] if sequence_parallel else [])]


token_orders = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all tokens", "own tokens"])


@token_orders
@pytest.mark.parametrize("changes", [{}, {"hidden_dropout": 0.1}, {"recompute_granularity": "selective"}], ids=str)
def test_a_block_makes_two_sums_forward_and_two_backward(changes: dict[str, Any], sequence_parallel: bool) -> None:
    forward, backward = operations(2, sequence_parallel=sequence_parallel, **changes)
    assert forward == forward_of(sequence_parallel)
    assert backward == backward_of(sequence_parallel, [[]] * LAYERS)


@token_orders
@pytest.mark.parametrize("hidden_dropout", [0.0, 0.1])
@pytest.mark.parametrize("of_chunk", [1, 2, 4])
def test_a_recomputation_repeats_the_operations_of_its_blocks_but_the_last_sum(
    of_chunk: int, hidden_dropout: float, sequence_parallel: bool
) -> None:
    recomputed = FULL | {"recompute_num_layers": of_chunk, "hidden_dropout": hidden_dropout}
    forward, backward = operations(4, sequence_parallel=sequence_parallel, **recomputed)
    repeated = (2 * of_chunk * HALF[sequence_parallel][0])[:-1]
    assert forward == forward_of(sequence_parallel)
    assert backward == backward_of(sequence_parallel, [repeated if block % of_chunk == 0 else [] for block in range(LAYERS)])


@token_orders
def test_a_loss_in_chunks_makes_one_gather_for_each(sequence_parallel: bool) -> None:
    forward, backward = operations(2, sequence_parallel=sequence_parallel, loss_chunk_tokens=10)
    chunks = -(-SAMPLES * LENGTH // 10)
    assert forward == [*forward_of(sequence_parallel)[:-1], *["gather"] * chunks]
    assert backward == backward_of(sequence_parallel, [[]] * LAYERS)


@token_orders
def test_an_evaluation_makes_the_operations_of_forward(sequence_parallel: bool) -> None:
    assert operations(2, sequence_parallel=sequence_parallel, trains=False, **FULL) == (forward_of(sequence_parallel), [])
