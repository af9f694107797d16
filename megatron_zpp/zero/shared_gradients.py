"""Makes the gradients of elements that several tensor ranks hold equal, once per step, on the slices that the optimizer reads.

Backward leaves on each holder of an element the whole gradient or a part of it (parallel/division.py:Gradient). After the last descent of
a step, one gather over the tensor link brings every rank the shared elements of all others. Each holder then takes

    partial    the sum over the holders, in fp32 and in the order of their ranks
    whole      what the first holder has

So all holders have the same bits, whatever codes their ladders got on the way, and their main weights and moments stay equal for ever. Sum
and mean over data ranks commute. On the primary rung a rank handles 1/D of the shared elements, once per step instead of per micro-batch.

With an optimizer on the full rung this happens after the mean has climbed back, for the shared elements of all slices. On the own slice
alone the climbs would have to wait for the last descent of all units, instead of running beside backward; the bits would be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.links import Ladder
from megatron_zpp.parallel.division import Gradient
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.shared_places import shared_places


@dataclass(frozen=True)
class _Columns:
    """Columns [start, stop) of what is gathered. addends: the holders whose values are added up, in order."""

    start: int
    stop: int
    addends: tuple[int, ...]
    numels: tuple[int, ...]  # of the places that take the sums, one after the other


class SharedGradients:
    """The shared elements in the gradients that this rank's optimizer reads."""

    def __init__(self, gradients: Sequence[UnitGradient], ladder: Ladder, first_slice: int, slices: int) -> None:
        """first_slice, slices: those of `for_optimizer` in each gradient. Raises RuntimeError as `shared_places` does."""
        self._link = ladder.tensor_link
        self._views: list[Tensor] = []
        self._columns: list[_Columns] = []
        start = 0
        layouts = [gradient.layout for gradient in gradients]
        for sharing, places in shared_places(layouts, first_slice, slices, ladder.grid.tensor_ranks).items():
            holders = sharing.holders[ladder.tensor_rank]
            numels = tuple(place.numel for place in places)
            addends = holders if sharing.gradient is Gradient.PARTIAL else holders[:1]
            self._columns.append(_Columns(start, start + sum(numels), addends, numels))
            self._views += [gradients[place.unit].for_optimizer.range(place.start, place.stop) for place in places]
            start += sum(numels)

    def combine(self) -> None:
        """Makes them equal on all holders. Every rank must call it, once per step: twice, sums would be too large.

        The host does not wait for a device.
        """
        if self._link is None or not self._views:
            return  # alike on all ranks of the link, which have the same slice
        gathered = self._link.gather(torch.cat(self._views), Category.REPLICAS)
        totals: list[Tensor] = []
        for columns in self._columns:
            first, *others = (gathered[rank, columns.start : columns.stop] for rank in columns.addends)
            for other in others:
                first += other
            totals += first.split(columns.numels)
        torch._foreach_copy_(self._views, totals)
