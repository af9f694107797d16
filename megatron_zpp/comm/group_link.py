"""What the tensor link and the context link have in common: operations over a lane, at once or started, whose bytes are booked.

Computation calls such a link itself, and every rank of its group must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_zpp.comm.backend import Backend
from megatron_zpp.comm.ledger import Category, Ledger
from megatron_zpp.comm.operation import Operation, make_runner
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.streams import Streams
from megatron_zpp.comm.waits import Waits
from megatron_zpp.parallel.ranks_in_words import ranks_in_words
from megatron_zpp.parallel.topology import Lane


class Pending:
    """A result of a link under way."""

    def __init__(self, link: str, finish: Callable[[], None], result: Callable[[], Tensor]) -> None:
        self._link = link
        self._finish: Callable[[], None] | None = finish
        self._result = result

    def wait(self) -> Tensor:
        """The result. Raises RuntimeError if it is called twice."""
        if self._finish is None:
            raise RuntimeError(f"a result of the {self._link} was waited for twice")
        finish, self._finish = self._finish, None  # with it, what the operation holds
        finish()
        return self._result()


class GroupLink:
    """The collectives of one rank over `lane`.

    Their bytes are booked when they start: those of the model under the category of `book_under`, which is `category` at first.
    """

    def __init__(
        self, lane: Lane, category: Category, backend: Backend, ledger: Ledger, staging: Staging, streams: Streams | None, waits: Waits
    ) -> None:
        members = backend.grid.members(lane.link, backend.rank)
        self.ranks = len(members)
        self.rank = members.index(backend.rank)
        self.name = f"{lane.link.value} link"
        self._lane = lane
        self._backend = backend
        self._ledger = ledger
        self._staging = staging
        names = waits.ranks or range(backend.grid.world_size)
        of_members = ranks_in_words(names[member] for member in members)
        self._runner = make_runner(f"{lane.link.value}-link", f"{self.name} of {of_members}", streams, waits)
        self._category = category

    def book_under(self, category: Category) -> None:
        """Books what comes from now on under `category`, unless a call names another."""
        self._category = category

    def _start(self, operation: Operation, result: Callable[[], Tensor]) -> Pending:
        return Pending(self.name, self._runner.start(operation), result)

    def _book(self, category: Category, bytes_per_member: int) -> None:
        self._ledger.book(category, self._ledger.measure(self._lane.link, bytes_per_member))


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of contiguous values, without a copy."""
    return values.view(-1).view(torch.uint8)
