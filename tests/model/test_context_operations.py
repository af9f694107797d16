"""What ranks that divide samples exchange, and what they keep: the same list on every rank, and kept inputs that change no bit."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.context_ranks import run_ladders
from harness.counting_backend import CountingBackend
from harness.divided_gpt import GptRank
from harness.same_gpt import divided_gpt, whole_gpt
from harness.small_engine import Job, RecordingLanes, random_pauses
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.kept_places import Arena, NewPlaces, Places
from megatron_zpp.comm.links import Links
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Link
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.tensor_parallel.kept_inputs import KeptInputs
from megatron_zpp.training.kept_inputs import kept_inputs_shape
from megatron_zpp.zero.policy import POLICIES

pytestmark = pytest.mark.virtual

CPU = torch.device("cpu")
SAMPLES, LENGTH = 2, 12
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_num_layers": 1}
TEXT = torch.randint(64, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("recomputed", [{}, FULL, FULL | {"recompute_num_layers": 2}, {"recompute_granularity": "selective"}], ids=str)
def test_with_random_pauses_all_ranks_of_a_group_make_the_same_calls_in_forward_recomputation_and_backward(
    recomputed: dict[str, Any],
) -> None:
    grid, job = Grid.of_nodes(2, 4, 2, 2), Job(POLICIES[3], steps=2, microbatches=2)

    def program(backend: VirtualBackend) -> tuple[list[tuple[str, int]], list[int]]:
        generator = random.Random(backend.rank)
        counted = CountingBackend(backend, lambda: time.sleep(generator.choice([0.0, 0.0, 0.0002, 0.001])))
        lanes = RecordingLanes(random_pauses(100 + backend.rank))
        rank = GptRank(job, counted, lanes, gpt="Llama 3", sequence_parallel=True, changes=recomputed)
        rank.train()
        return counted.calls, counted.exchanges

    calls, exchanges = zip(*run_world(grid, program, takes_turns=False), strict=True)
    for rank in range(grid.world_size):
        assert exchanges[rank] == exchanges[grid.members(Link.CONTEXT, rank)[0]]
        assert calls[rank] == calls[grid.members(Link.TENSOR, rank)[0]]
    of_block = 6 if recomputed.get("recompute_granularity") == "full" else 4
    assert len(exchanges[0]) == 2 * 2 * 2 * of_block  # steps, micro-batches and blocks


@pytest.mark.parametrize("place", ["divided", "in an arena", "divided in an arena"])
@pytest.mark.parametrize("tensor_ranks, context_ranks", [(1, 2), (2, 2), (2, 4)])
def test_kept_inputs_of_own_tokens_change_no_bit(tensor_ranks: int, context_ranks: int, place: str) -> None:
    whole = whole_gpt("Llama 3", **FULL)

    def gradients(links: Links, *, keeps: bool) -> list[Tensor]:
        tensor = None if links.tensor_link is None else TensorParallel(links.tensor_link)
        gpt = divided_gpt("Llama 3", whole, tensor, links.context_link, **FULL)
        link = links.tensor_link if "divided" in place else None
        ranks = 1 if link is None else link.ranks
        config = replace(gpt.config, seq_length=LENGTH, partition_activations=link is not None)
        shape = kept_inputs_shape(config, SAMPLES, ranks, sequence_parallel=False, context_ranks=context_ranks)
        assert shape.numel == SAMPLES * LENGTH // context_ranks * config.hidden_size
        if keeps:
            part = shape.part_numel(4)
            places: Places = Arena(shape.chunks, part, torch.float32, CPU) if "arena" in place else NewPlaces()
            gpt.keep_inputs(KeptInputs(places, link))
        own = TEXT[:, :-1].chunk(context_ranks, dim=1)[links.grid.context_rank_of(links.backend.rank)]
        labels = TEXT[:, 1:].chunk(context_ranks, dim=1)[links.grid.context_rank_of(links.backend.rank)]
        gpt(own, labels, first_sample=0).mean().backward()
        return [parameter.grad for parameter in gpt.parameters() if parameter.grad is not None]

    def program(links: Links) -> bool:
        plain, kept = gradients(links, keeps=False), gradients(links, keeps=True)
        return all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))

    assert all(run_ladders(Grid.of_nodes(1, tensor_ranks * context_ranks, tensor_ranks, context_ranks), program))
