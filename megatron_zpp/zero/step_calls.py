"""What the calls of each rank came to in a step, which the ranks compare with the norm of its gradient, in the same message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.comm.hop_order import HopOrder, first_difference
from megatron_zpp.comm.links import Links
from megatron_zpp.zero.alike import texts_of_ranks
from megatron_zpp.zero.gradients import UnitGradient


class StepCalls:
    """The order of the hops, and the parameters that no loss has reached.

    A hop carries no name. If ranks ask for hops in different orders, they take the values of other units, and the update must be refused.
    A parameter that no rank's loss has reached in the step has no gradient in plain torch, and its AdamW passes it over. The mean
    gradient, which is zero there, does not tell that from a gradient of zeros.
    """

    def __init__(self, gradients: Sequence[UnitGradient], links: Links) -> None:
        self._gradients = gradients
        self._links = links

    @property
    def _order(self) -> HopOrder:
        return self._links.hop_order

    def reaches_all(self) -> bool:
        """Whether this rank's loss has reached every parameter in this step."""
        return all(len(gradient.reached) == len(gradient.layout.params) for gradient in self._gradients)

    def numbers(self) -> Tensor:
        """What this rank tells the others, [2] fp64 on its device: its order of hops, and whether it has left a parameter out."""
        row = torch.zeros(2, dtype=torch.float64, device=self._links.device)
        for column, value in enumerate((self._order.checksum, not self.reaches_all())):
            if value:
                row[column].fill_(value)  # `row[column] = value` would wait for the device
        return row

    def differ(self, of_ranks: Tensor) -> Tensor:
        """Whether the ranks have asked for hops in different orders, [] bool on the device. of_ranks: `numbers` of every rank."""
        return (of_ranks[:, 0] != of_ranks[0, 0]).any()

    def all_left_some_out(self, of_ranks: Tensor) -> Tensor:
        """What `take_unused` reads, [1] fp64; nothing if this rank's own loss has reached all parameters, because then none is unused."""
        return of_ranks[:0, 1] if self.reaches_all() else of_ranks[:, 1].min().view(1)

    def take_unused(self, numbers: list[float]) -> frozenset[str]:
        """The parameters that no rank's loss has reached. numbers: the last is that of `all_left_some_out`, which is removed.

        If all ranks have left some out, they gather which, and wait.
        """
        if self.reaches_all() or not numbers.pop():
            return frozenset()
        reached = [index in gradient.reached for gradient in self._gradients for index in range(len(gradient.layout.params))]
        own = torch.tensor(reached, dtype=torch.uint8, device=self._links.device)
        is_reached = self._links.gather_world(own).flatten(0, 1).any(dim=0).tolist()
        names = (placed.spec.name for gradient in self._gradients for placed in gradient.layout.params)
        return frozenset(name for name, is_one in zip(names, is_reached, strict=True) if not is_one)

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
