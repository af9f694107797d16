"""The link of a rank to those that share its layers and have the same samples: gathers their values, and adds them up.

T ranks of one node, in the order of their tensor ranks. A sum is an exchange of parts, each added in fp32 in the order of the ranks and
rounded once, so every rank gets the same bits, and no collective adds. A sum that every rank needs whole is gathered afterwards:

    rank 0    a0 a1    --exchange-->  a0 b0  --add-->  a0+b0  --gather-->  a0+b0  a1+b1
    rank 1    b0 b1                   a1 b1            a1+b1               a0+b0  a1+b1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_zpp.comm.backend import Backend, Work
from megatron_zpp.comm.group_link import GroupLink, Pending, as_bytes
from megatron_zpp.comm.ledger import Category, Ledger
from megatron_zpp.comm.operation import Operation, Stage
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.streams import Streams
from megatron_zpp.comm.waits import Waits
from megatron_zpp.parallel.topology import TENSOR_ACROSS

_ALIGNMENT = 16  # bytes; a part is a whole number of them, so that kernels read and write 16 at a time


def padded_part_numel(numel: int, ranks: int, element_bytes: int) -> int:
    """The elements of one rank's part of `numel`: as few as possible, and a whole number of 16 bytes."""
    step = ranks * max(1, _ALIGNMENT // element_bytes)
    return -(-numel // step) * step // ranks


class TensorLink(GroupLink):
    """The gathers and sums of one rank over the tensor link."""

    def __init__(self, backend: Backend, ledger: Ledger, staging: Staging, streams: Streams | None, waits: Waits) -> None:
        super().__init__(TENSOR_ACROSS, Category.ACTIVATIONS, backend, ledger, staging, streams, waits)

    def gather(self, own: Tensor, category: Category | None = None) -> Tensor:
        """[T, *own.shape]: `own` of every rank, all of one shape."""
        operation, output = self._gathering(own, category or self._category)
        self._runner.run(operation)
        return output

    def sum_scattered(self, values: Tensor) -> Tensor:
        """The own part [n / T, ...] of the sum of all ranks' `values` [n, ...], in their dtype. T must divide n."""
        operation, output = self._summing_parts(values)
        self._runner.run(operation)
        return output

    def summed(self, values: Tensor) -> Tensor:
        """The sum of all ranks' `values`, in their shape and dtype."""
        operation, result = self._summing(values)
        self._runner.run(operation)
        return result()

    def start_gather(self, own: Tensor) -> Pending:
        """The same as `gather`; nothing may write to `own` before its end."""
        operation, output = self._gathering(own, self._category)
        return self._start(operation, lambda: output)

    def start_sum_scattered(self, values: Tensor) -> Pending:
        """The same as `sum_scattered`; nothing may write to `values` before its end."""
        operation, output = self._summing_parts(values)
        return self._start(operation, lambda: output)

    def start_summed(self, values: Tensor) -> Pending:
        """The same as `summed`; nothing may write to `values` before its end. On a CPU the gather only begins when it is waited for."""
        operation, result = self._summing(values)
        return self._start(operation, result)

    def _gathering(self, own: Tensor, category: Category) -> tuple[Operation, Tensor]:
        sent = own.detach().contiguous()
        output = sent.new_empty((self.ranks, *sent.shape))
        return Operation((self._gather_stage(sent, output, category),)), output

    def _summing_parts(self, values: Tensor) -> tuple[Operation, Tensor]:
        rows = values.shape[0]
        if rows % self.ranks:
            raise RuntimeError(
                f"the {self.ranks} ranks of the tensor link cannot share {rows} rows, those of values of shape {values.shape}"
            )
        sent = values.detach().contiguous()
        output = sent.new_empty((rows // self.ranks, *sent.shape[1:]))
        return Operation((self._sum_stage(sent, output),)), output

    def _summing(self, values: Tensor) -> tuple[Operation, Callable[[], Tensor]]:
        """Its values are followed by zeros if the ranks cannot share them in parts of whole 16 bytes."""
        flat = values.detach().reshape(-1)
        numel = flat.numel()
        part_numel = padded_part_numel(numel, self.ranks, flat.element_size())
        if part_numel * self.ranks > numel:
            flat = torch.cat((flat, flat.new_zeros(part_numel * self.ranks - numel)))
        part, output = flat.new_empty(part_numel), torch.empty_like(flat)
        stages = (self._sum_stage(flat, part), self._gather_stage(part, output, self._category))
        return Operation(stages), lambda: output[:numel].view(values.shape)

    def _gather_stage(self, sent: Tensor, output: Tensor, category: Category) -> Stage:
        """The gather that fills `output` [T ranks], and that has its bytes booked now."""
        self._book(category, sent.nbytes)
        return Stage("gather", partial(self._backend.all_gather, self._lane, as_bytes(output), as_bytes(sent)), lambda: None)

    def _sum_stage(self, sent: Tensor, part: Tensor) -> Stage:
        """The exchange after which `part` is the own part of the sum; its bytes are booked now."""
        self._book(self._category, part.nbytes)
        buffers: list[Tensor] = []

        def launch() -> Work | None:
            buffers.append(self._staging.take(sent.nbytes))
            return self._backend.exchange(self._lane, buffers[0], as_bytes(sent))

        def land() -> None:
            add_in_order(buffers[0].view(sent.dtype).view(self.ranks, -1), part.view(-1))
            self._staging.give(buffers.pop())

        return Stage("sum", launch, land)


def add_in_order(values: Tensor, total: Tensor) -> None:
    """Writes the sum over the first dim of `values` [T, numel], T > 1, to `total` [numel] of the same dtype.

    It adds in fp32, one row after the other, and rounds once. Each line below is one kernel on a GPU.
    """
    if len(values) == 2:
        torch.add(values[0], values[1], out=total)  # torch adds two 16-bit values in fp32, too
        return
    wide = values[0].float()
    wide = wide + values[1]
    for value in values[2:-1]:
        wide += value
    torch.add(wide, values[-1], out=total)
