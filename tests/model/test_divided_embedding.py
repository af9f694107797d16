"""What tensor ranks have after the embedding is what one rank has, to the bit: words, positions and what dropout drops."""

from __future__ import annotations

import pytest
import torch
from harness.tensor_parts import VOCAB, config_of
from harness.tensor_ranks import run_tensor_ranks
from torch import Tensor

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.model.randomness import UnitRandomness, mixed
from megatron_zpp.tensor_parallel.context import TensorParallel

pytestmark = pytest.mark.virtual

SAMPLES, LENGTH, FIRST_SAMPLE = 3, 12, 2**33 + 5
TOKENS = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(2))
POSITIONS = torch.arange(LENGTH).flip(0).expand(SAMPLES, LENGTH)


def embedded(dtype: torch.dtype, position_ids: Tensor | None, tensor: TensorParallel | None = None) -> Tensor:
    gpt = materialize(GPT(config_of("GPT-2", hidden_dropout=0.3), VOCAB, 7, dtype, tensor))
    hidden: Tensor = gpt.embedding(TOKENS, FIRST_SAMPLE, position_ids)
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


def test_attention_draws_other_numbers_on_every_tensor_rank_than_on_the_others_and_on_one_rank() -> None:
    cpu = torch.device("cpu")

    def drawn(randomness: UnitRandomness) -> Tensor:
        with randomness.scope(is_needed=True, first_sample=8, device=cpu):
            return torch.rand(100)

    links: list[TensorLink] = run_tensor_ranks(4, lambda link: link)
    draws = [drawn(UnitRandomness(7, 3, TensorParallel(link))) for link in links]
    alone = drawn(UnitRandomness(7, 3))
    torch.manual_seed(mixed(7, 8, 3))
    assert torch.equal(alone, torch.rand(100))
    assert not any(torch.equal(one, other) for index, one in enumerate(draws) for other in (alone, *draws[:index]))
