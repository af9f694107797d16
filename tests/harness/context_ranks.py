"""Context ranks as threads: what a program returns on each of the ranks that share every sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from harness.worlds import TurnLanes, run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.parallel.grid import Grid

Result = TypeVar("Result")
CPU = torch.device("cpu")


def run_ladders(grid: Grid, program: Callable[[Links], Result]) -> list[Result]:
    """What `program` returns on each rank, given its ladder with the links beside it."""

    def on_rank(backend: VirtualBackend) -> Result:
        return program(Links(backend, TurnLanes(), Ledger(grid, backend.rank), CPU))

    return run_world(grid, on_rank)


def run_context_ranks(ranks: int, program: Callable[[ContextLink], Result]) -> list[Result]:
    """What `program` returns on each of `ranks` ranks, which have one context link."""

    def on_rank(links: Links) -> Result:
        if links.context_link is None:
            raise RuntimeError("one rank has no context link")
        return program(links.context_link)

    return run_ladders(Grid.of_nodes(1, ranks, 1, ranks), on_rank)
