"""Attention dropout on ranks that share layers or samples. It draws from the generator of a process, so the ranks here are processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness.rank_pool import RankPool
from harness.tensor_parts import VOCAB, config_of
from torch import Tensor

from megatron_zpp.comm.backend import TorchBackend
from megatron_zpp.comm.lanes import ThreadLanes
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import make_lane_groups
from megatron_zpp.tensor_parallel.context import TensorParallel

CPU = torch.device("cpu")
TENSOR, CONTEXT = Grid.of_nodes(1, 2, 2), Grid.of_nodes(1, 2, 1, 2)
CHANGES: list[dict[str, Any]] = [
    {},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_num_layers": 2},
]


def gradients_of_each_recomputation(grid: Grid, sequence_parallel: bool) -> list[dict[str, Tensor]]:
    dist.init_process_group("gloo")
    try:
        backend = TorchBackend(grid, dist.get_rank(), make_lane_groups(grid, dist.get_rank(), timedelta(seconds=60), CPU))
        links = Links(backend, ThreadLanes(), Ledger(grid, backend.rank), CPU)
        return [gradients(links, sequence_parallel, **changes) for changes in CHANGES]
    finally:
        dist.destroy_process_group()


def gradients(links: Links, sequence_parallel: bool, **changes: Any) -> dict[str, Tensor]:
    tensor = None if links.tensor_link is None else TensorParallel(links.tensor_link, sequence_parallel)
    config = config_of("GPT-2", attention_dropout=0.3, hidden_dropout=0.2, **changes)
    gpt = materialize(GPT(config, VOCAB, 7, torch.float32, tensor, links.context_link))
    text = torch.randint(VOCAB, (3, 13), generator=torch.Generator().manual_seed(2))
    context_ranks, context_rank = links.grid.context_ranks, links.grid.context_rank_of(links.backend.rank)
    tokens, labels = (values.chunk(context_ranks, dim=1)[context_rank] for values in (text[:, :-1], text[:, 1:]))
    torch.rand(links.backend.rank)  # generators of ranks are in different states
    loss = gpt(tokens, labels, first_sample=4).mean()
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad for name, parameter in gpt.named_parameters() if parameter.grad is not None}


def test_a_recomputation_drops_what_forward_dropped(ranks: RankPool) -> None:
    for grid, sequence_parallel in ((TENSOR, False), (TENSOR, True), (CONTEXT, False)):
        for kept, *recomputed in ranks.run(1, 2, gradients_of_each_recomputation, grid, sequence_parallel):
            for again in recomputed:
                assert set(again) == set(kept)
                assert all(torch.equal(again[name], kept[name]) for name in kept)
