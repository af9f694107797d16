"""What the calls of each rank came to in a step, which the ranks compare with the norm of its gradient, in the same message."""

from __future__ import annotations

import hashlib
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
        """What this rank tells the others, [2] fp64 on its device: checksums of its order of hops and of parameters that it left out."""
        row = torch.zeros(2, dtype=torch.float64, device=self._links.device)
        for column, value in enumerate((self._order.checksum, _checksum(self._left_out()))):
            if value:
                row[column].fill_(value)  # `row[column] = value` would wait for the device
        return row

    def _left_out(self) -> list[str]:
        """The parameters that this rank's loss has not reached."""
        if self.reaches_all():
            return []
        placed = ((index in gradient.reached, param) for gradient in self._gradients for index, param in enumerate(gradient.layout.params))
        return [param.spec.name for is_reached, param in placed if not is_reached]

    def differ(self, of_ranks: Tensor) -> Tensor:
        """Whether the ranks have asked for hops in different orders, [] bool on the device. of_ranks: `numbers` of every rank."""
        return (of_ranks[:, 0] != of_ranks[0, 0]).any()

    def left_out(self, of_ranks: Tensor) -> Tensor:
        """What `take_unused` reads, [2] fp64: the least and the largest checksum of left out parameters.

        Nothing if this rank knows that no parameter is unused, because its own loss has reached all.
        """
        return of_ranks[:0, 1] if self.reaches_all() else torch.stack(of_ranks[:, 1].aminmax())

    def take_unused(self, numbers: list[float]) -> frozenset[str]:
        """The parameters that no rank's loss has reached. numbers: the last are those of `left_out`, which are removed.

        If all ranks left some out, and not the same, they gather which, and wait.
        """
        own = frozenset(self._left_out())
        if not own:
            return own
        largest, least = numbers.pop(), numbers.pop()
        if not least:
            return frozenset()
        if least == largest:
            return own
        names = [placed.spec.name for gradient in self._gradients for placed in gradient.layout.params]
        is_left_out = torch.tensor([name in own for name in names], dtype=torch.uint8, device=self._links.device)
        by_all = self._links.gather_world(is_left_out).flatten(0, 1).all(dim=0).tolist()
        return frozenset(name for name, is_by_all in zip(names, by_all, strict=True) if is_by_all)

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


def _checksum(names: Sequence[str]) -> int:
    """Of some names, less than 2^53, which fp64 has exactly; 0 if there are none, and only then."""
    return 1 + int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=6).digest(), "little") if names else 0
