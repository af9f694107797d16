"""What the calls of each rank came to in a step, which the ranks compare with the norm of its gradient, in the same message."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from megatron_zpp.comm.hop_order import HopOrder, first_difference
from megatron_zpp.comm.links import Links
from megatron_zpp.zero.alike import texts_of_ranks
from megatron_zpp.zero.gradients import UnitGradient

_BITS = 48  # of a number; fp64 has every integer below 2^53


class StepCalls:
    """The order of the hops, and the parameters that no loss has reached.

    A hop carries no name. If ranks ask for hops in different orders, they take the values of other units, and the update must be refused.
    A parameter that no rank's loss has reached in the step has no gradient in plain torch, and its AdamW passes it over. The mean
    gradient, which is zero there, does not tell that from a gradient of zeros.
    """

    def __init__(self, gradients: Sequence[UnitGradient], links: Links) -> None:
        self._gradients = gradients
        self._links = links
        self._names = [placed.spec.name for gradient in gradients for placed in gradient.layout.params]
        self._words = -(-len(self._names) // _BITS)

    @property
    def _order(self) -> HopOrder:
        return self._links.hop_order

    def reaches_all(self) -> bool:
        """Whether this rank's loss has reached every parameter in this step."""
        return all(len(gradient.reached) == len(gradient.layout.params) for gradient in self._gradients)

    def numbers(self) -> Tensor:
        """What this rank tells the others, [numel] fp64 on its device."""
        row = torch.zeros(1 + self._words, dtype=torch.float64, device=self._links.device)
        for column, value in enumerate((self._order.checksum, *self._unreached())):
            if value:
                row[column].fill_(value)  # `row[column] = value` would wait for the device
        return row

    def _unreached(self) -> list[int]:
        """The parameters that this rank's loss has not reached, a bit each; nothing if there are none."""
        if self.reaches_all():
            return []
        bits = [index not in gradient.reached for gradient in self._gradients for index in range(len(gradient.layout.params))]
        return [sum(bit << place for place, bit in enumerate(bits[start : start + _BITS])) for start in range(0, len(bits), _BITS)]

    def differ(self, of_ranks: Tensor) -> Tensor:
        """Whether the ranks have asked for hops in different orders, [] bool on the device. of_ranks: `numbers` of every rank."""
        return (of_ranks[:, 0] != of_ranks[0, 0]).any()

    def of_unused(self, of_ranks: Tensor) -> Tensor:
        """What `take_unused` reads, [numel] fp64; nothing if this rank knows that there are none, because its own loss has reached all."""
        return of_ranks[:, 1:].flatten()[: 0 if self.reaches_all() else None]

    def take_unused(self, numbers: list[float]) -> frozenset[str]:
        """The parameters that no rank's loss has reached. numbers: their last ones are those of `of_unused`, which are removed."""
        if self.reaches_all():
            return frozenset()
        first = len(numbers) - self._words * self._links.grid.world_size
        on_all = [reduce(and_, map(int, numbers[first + word :: self._words])) for word in range(self._words)]
        del numbers[first:]
        return frozenset(name for index, name in enumerate(self._names) if on_all[index // _BITS] >> index % _BITS & 1)

    def refuse_difference(self) -> None:
        """Raises RuntimeError with the first hop for which ranks have asked differently. Every rank must call it if they `differ`."""
        texts = texts_of_ranks(self._links.backend, self._links.device, self._order.as_text())
        difference = first_difference(texts, self._links.ranks)
        raise RuntimeError(
            f"{difference}. A rank takes what comes next, whatever the unit, so losses and gradients since the last step are wrong; "
            "this step is refused, and has changed no weight. Every rank must call the units in the order in which shard() names "
            "them, and call the module, engine.backward() and evaluations equally often (not within `if rank == 0:`)"
        )

    def begin_step(self) -> None:
        """The ranks have compared their calls."""
        self._order.begin()
