"""The link of a rank to those that share its layers and its samples: gathers their values, and adds them up.

T ranks of one node, in the order of their tensor ranks. A sum is an exchange of parts, each added in fp32 in the order of the ranks and
rounded once, so every rank gets the same bits, and no collective adds. Every rank of the group must make the same calls in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.comm.backend import Backend, Work, naming
from megatron_zpp.comm.ledger import Category, Ledger
from megatron_zpp.comm.staging import Staging
from megatron_zpp.parallel.topology import ACROSS, Link

_WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class Pending:
    """A collective of the tensor link under way."""

    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """The result; call it once."""
        return self.finish()


class TensorLink:
    """The collectives of one rank over the tensor link.

    watch: called now and then during a long wait. It raises if another rank has failed.
    """

    def __init__(self, backend: Backend, ledger: Ledger, staging: Staging, watch: Callable[[], None]) -> None:
        self.ranks = backend.grid.tensor_ranks
        self.rank = backend.grid.tensor_rank_of(backend.rank)
        self._backend = backend
        self._ledger = ledger
        self._staging = staging
        self._watch = watch

    def gather(self, own: Tensor, category: Category = Category.ACTIVATIONS) -> Tensor:
        """[T, *own.shape]: `own` of every rank, all of one shape."""
        return self.start_gather(own, category).wait()

    def sum_scattered(self, values: Tensor) -> Tensor:
        """The own part [n / T, ...] of the sum of all ranks' `values` [n, ...], in their dtype. T must divide n."""
        return self.start_sum_scattered(values).wait()

    def summed(self, values: Tensor) -> Tensor:
        """The sum of all ranks' `values`, in their shape and dtype."""
        return self.start_summed(values).wait()

    def start_summed(self, values: Tensor) -> Pending:
        """The same as `summed`; nothing may write to `values` before its end. The gather begins when it is waited for."""
        flat = values.detach().reshape(-1)
        padding = -flat.numel() % self.ranks
        if padding:
            flat = torch.cat((flat, flat.new_zeros(padding)))
        part, numel, shape = self.start_sum_scattered(flat), values.numel(), values.shape
        return Pending(lambda: self.gather(part.wait()).view(-1)[:numel].view(shape))

    def start_gather(self, own: Tensor, category: Category = Category.ACTIVATIONS) -> Pending:
        """The same as `gather`; nothing may write to `own` before its end."""
        sent = own.detach().contiguous()
        output = sent.new_empty((self.ranks, *sent.shape))
        self._ledger.book(category, self._ledger.measure(Link.TENSOR, sent.nbytes))
        work = self._backend.all_gather(ACROSS, output.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8))

        def finish() -> Tensor:
            self._wait(work)
            del sent_until_now[:]
            return output

        sent_until_now = [sent]
        return Pending(finish)

    def start_sum_scattered(self, values: Tensor) -> Pending:
        """The same as `sum_scattered`; nothing may write to `values` before its end."""
        if values.shape[0] % self.ranks:
            raise RuntimeError(f"{self.ranks} ranks cannot share the {values.shape[0]} rows of {tuple(values.shape)}")
        sent = values.detach().contiguous()
        received = torch.empty_like(sent)
        self._ledger.book(Category.ACTIVATIONS, self._ledger.measure(Link.TENSOR, sent.nbytes // self.ranks))
        work = self._backend.exchange(ACROSS, received.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8))

        def finish() -> Tensor:
            self._wait(work)
            del sent_until_now[:]
            return _sum_in_order(received.view(self.ranks, -1)).view(sent_shape)

        sent_until_now, sent_shape = [sent], (sent.shape[0] // self.ranks, *sent.shape[1:])
        return Pending(finish)

    def _wait(self, work: Work | None) -> None:
        if work is None:
            return
        ended = threading.Event()
        work.when_ended(ended.set)
        while not ended.wait(_WATCH_SECONDS):
            self._watch()
        with naming("tensor link"):
            work.wait()


def _sum_in_order(values: Tensor) -> Tensor:
    """The sum over the first dim of [T, numel], added in fp32 one after the other, in the dtype of the values."""
    total = values[0].float() + values[1].float()
    for value in values[2:]:
        total += value
    return total.to(values.dtype)
