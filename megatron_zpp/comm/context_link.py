"""The link of a rank to those that have other tokens of its samples: exchanges parts of values.

C ranks of one ladder, in the order of their tokens; they may be on several nodes.

    rank 0    a0 a1    --exchange-->  a0 b0
    rank 1    b0 b1                   a1 b1
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_zpp.comm.backend import Backend
from megatron_zpp.comm.group_link import GroupLink, Pending, as_bytes
from megatron_zpp.comm.ledger import Category, Ledger
from megatron_zpp.comm.operation import Operation, Stage
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.streams import Streams
from megatron_zpp.comm.waits import Waits
from megatron_zpp.parallel.topology import CONTEXT_ACROSS


class ContextLink(GroupLink):
    """The exchanges of one rank over the context link."""

    def __init__(self, backend: Backend, ledger: Ledger, staging: Staging, streams: Streams | None, waits: Waits) -> None:
        super().__init__(CONTEXT_ACROSS, Category.EXCHANGES, backend, ledger, staging, streams, waits)

    def exchange(self, parts: Tensor) -> Tensor:
        """[C, ...]: what every rank has for this one. parts: [C, ...], what this rank has for every other, all ranks' of one shape."""
        operation, output = self._exchanging(parts)
        self._runner.run(operation)
        return output

    def start_exchange(self, parts: Tensor) -> Pending:
        """The same as `exchange`; nothing may write to `parts` before its end."""
        operation, output = self._exchanging(parts)
        return self._start(operation, lambda: output)

    def _exchanging(self, parts: Tensor) -> tuple[Operation, Tensor]:
        if parts.shape[0] != self.ranks:
            raise RuntimeError(
                f"the {self.ranks} ranks of the {self.name} cannot exchange {parts.shape[0]} parts, of shape {parts.shape[1:]}"
            )
        sent = parts.detach().contiguous()
        output = torch.empty_like(sent)
        self._book(self._category, sent.nbytes // self.ranks)
        launch = partial(self._backend.exchange, self._lane, as_bytes(output), as_bytes(sent))
        return Operation((Stage("exchange", launch, lambda: None),)), output
