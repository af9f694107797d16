"""What tensor ranks have after the embedding is what one rank has, to the bit: words, positions and what dropout drops."""

from __future__ import annotations

import pytest
import torch
from harness.context_ranks import run_ladders
from harness.tensor_parts import VOCAB, config_of
from harness.tensor_ranks import run_tensor_ranks
from torch import Tensor

from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.model.randomness import UnitRandomness, mixed
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.tensor_parallel.context import TensorParallel

pytestmark = pytest.mark.virtual

SAMPLES, LENGTH, FIRST_SAMPLE = 3, 12, 2**33 + 5
TOKENS = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(2))
POSITIONS = torch.arange(LENGTH).flip(0).expand(SAMPLES, LENGTH)


def embedded(
    dtype: torch.dtype,
    position_ids: Tensor | None,
    tensor: TensorParallel | None = None,
    context: ContextLink | None = None,
    tokens: Tensor = TOKENS,
) -> Tensor:
    gpt = materialize(GPT(config_of("GPT-2", hidden_dropout=0.3), VOCAB, 7, dtype, tensor, context))
    hidden: Tensor = gpt.embedding(tokens, FIRST_SAMPLE, position_ids)
    return hidden.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("position_ids", [None, POSITIONS], ids=["in order", "position ids"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_embeddings_output_and_its_mask_have_the_bits_of_one_rank(ranks: int, position_ids: Tensor | None, dtype: torch.dtype) -> None:
    expected = embedded(dtype, position_ids)
    assert 0.2 < (expected == 0).float().mean() < 0.4
    for hidden in run_tensor_ranks(ranks, lambda link: embedded(dtype, position_ids, TensorParallel(link))):
        assert torch.equal(hidden, expected)
    parts = run_tensor_ranks(ranks, lambda link: embedded(dtype, position_ids, TensorParallel(link, True)))
    assert all(part.shape == (SAMPLES, LENGTH // ranks, expected.shape[-1]) for part in parts)
    assert torch.equal(torch.cat([part.flatten(0, 1) for part in parts]), expected.flatten(0, 1))


@pytest.mark.parametrize("position_ids", [None, POSITIONS], ids=["in order", "position ids"])
@pytest.mark.parametrize("context_ranks, tensor_ranks, sequence_parallel", [(4, 1, False), (2, 2, False), (2, 2, True)])
def test_ranks_that_share_samples_have_their_tokens_of_it_with_the_bits_and_the_mask_of_one_rank(
    context_ranks: int, tensor_ranks: int, sequence_parallel: bool, position_ids: Tensor | None
) -> None:
    expected = embedded(torch.float32, position_ids)

    def on_rank(links: Links) -> Tensor:
        tensor = None if links.tensor_link is None else TensorParallel(links.tensor_link, sequence_parallel)
        context_rank = links.grid.context_rank_of(links.backend.rank)
        return embedded(torch.float32, position_ids, tensor, links.context_link, TOKENS.chunk(context_ranks, dim=1)[context_rank])

    found = run_ladders(Grid.of_nodes(1, context_ranks * tensor_ranks, tensor_ranks, context_ranks), on_rank)
    step = 1 if sequence_parallel else tensor_ranks  # without it, tensor ranks have the same
    for context_rank, whole in enumerate(expected.chunk(context_ranks, dim=1)):
        parts = found[context_rank * tensor_ranks : (context_rank + 1) * tensor_ranks : step]
        assert torch.equal(torch.cat([part.flatten(0, 1) for part in parts]), whole.flatten(0, 1))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_site_of_a_unit_counts_the_elements_of_the_run(sequence_parallel: bool) -> None:
    hidden = torch.empty(SAMPLES, LENGTH, 16)
    whole = UnitRandomness(7, 3).mask_starts(2, FIRST_SAMPLE, hidden)

    def on_rank(link: TensorLink) -> tuple[Tensor, ...]:
        own = hidden[:, : LENGTH // link.ranks] if sequence_parallel else hidden
        return UnitRandomness(7, 3, TensorParallel(link, sequence_parallel)).mask_starts(2, FIRST_SAMPLE, own)

    for rank, starts in enumerate(run_tensor_ranks(4, on_rank)):
        before = rank * hidden.numel() // 4 if sequence_parallel else 0
        assert [start.tolist() for start in starts] == [[key, first + before] for key, first in (start.tolist() for start in whole)]


def test_attention_draws_other_numbers_on_every_rank_with_other_heads_than_on_the_others_and_on_one_rank() -> None:
    cpu = torch.device("cpu")

    def drawn(randomness: UnitRandomness) -> Tensor:
        with randomness.scope(is_needed=True, first_sample=8, device=cpu):
            return torch.rand(100)

    def of_rank(links: Links) -> UnitRandomness:
        return UnitRandomness(7, 3, None if links.tensor_link is None else TensorParallel(links.tensor_link), links.context_link)

    grids = [Grid.of_nodes(1, 4, 4), Grid.of_nodes(1, 4, 1, 4), Grid.of_nodes(1, 4, 2, 2)]
    draws = [drawn(randomness) for grid in grids for randomness in run_ladders(grid, of_rank)]
    alone = drawn(UnitRandomness(7, 3))
    torch.manual_seed(mixed(7, 8, 3))
    assert torch.equal(alone, torch.rand(100))
    assert not any(torch.equal(one, other) for index, one in enumerate(draws) for other in (alone, *draws[:index]))
