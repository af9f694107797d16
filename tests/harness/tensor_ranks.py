"""Tensor ranks as threads: what a program returns on each of the ranks that share every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from harness.worlds import TurnLanes, run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.parallel.grid import Grid

Result = TypeVar("Result")
CPU = torch.device("cpu")


def run_tensor_ranks(ranks: int, program: Callable[[TensorLink], Result]) -> list[Result]:
    """What `program` returns on each of `ranks` ranks, which have one tensor link."""

    def on_rank(backend: VirtualBackend) -> Result:
        link = Links(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU).tensor_link
        if link is None:
            raise RuntimeError("one rank has no tensor link")
        return program(link)

    return run_world(Grid.of_nodes(1, ranks, ranks), on_rank)


def summed_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' values, added in fp32 one after the other and rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
