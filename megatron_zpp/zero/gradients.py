"""The gradient of one unit on one rank: its sums over micro-batches, and the collector that takes it from autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.links import Ladder
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.policy import Policy, Rung


class UnitGradient:
    """fp32 sums over micro-batches, on the rung where the policy keeps gradients.

    The first micro-batch of a step is written over the sums of the step before, the others are added.
    total: [slices * slice_numel] fp32, this rank's slices of that rung. resting: the same values by region.
    primary: this rank's own slice of them. for_optimizer: the slices that this rank's optimizer reads, `primary` or all of `resting`.
    reached: indices of the parameters that this rank's loss has reached in this step.
    """

    def __init__(self, name: str, layout: FlatLayout, policy: Policy, ladder: Ladder) -> None:
        self.name = name
        self.layout = layout
        topology, own_slice = ladder.topology, ladder.own_slice
        # A secondary rung holds the slices of the N ranks of a column, in the order of their partitions.
        own = {Rung.PRIMARY: 0, Rung.SECONDARY: topology.partition_of(ladder.data_rank), Rung.FULL: own_slice}[policy.gradients]
        self.total = torch.zeros(policy.gradients.slices(topology) * layout.slice_numel, dtype=torch.float32, device=ladder.device)
        self.resting = Regions.of(self.total, layout.runs)
        self.primary = self.resting.slice_at(own)
        self.for_optimizer = self.resting if policy.optimizer is Rung.FULL else self.primary
        self.reached: set[int] = set()


class Collector:
    """Collects one micro-batch's gradients of a unit, parameter by parameter, until the unit is complete.

    If this rank has the sums of the whole unit, each gradient is copied or added to them at once. Otherwise gradients wait in a buffer of
    the working dtype until they descend. Gradients of one dimension are copied or added together at the end: they are small, and many calls
    cost more.
    """

    def __init__(self, gradient: UnitGradient, policy: Policy, dtype: torch.dtype, ladder: Ladder) -> None:
        self._gradient = gradient
        self._layout = gradient.layout
        self._has_sums = policy.gradients is Rung.FULL or ladder.topology.is_one_rank
        self._adds = False  # whether gradients are added to what is there: to the sums of earlier micro-batches of the step
        self._dtype = dtype
        self._staging = ladder.staging
        self._paddings = tuple(gradient.layout.paddings(0, gradient.layout.slices))
        self._is_small = tuple(len(param.spec.shape) <= 1 for param in gradient.layout.params)
        self._arrived: set[int] = set()
        self._small: dict[int, Tensor] = {}  # gradients of one dimension that have arrived, by parameter
        self._buffer: Tensor | None = None  # [numel] of the working dtype, from the first gradient on until the descent has landed

    def collect(self, index: int, gradient: Tensor) -> bool:
        """Takes the gradient of parameter `index` of the layout; returns True once every parameter has brought its gradient."""
        if self._is_small[index]:
            self._small[index] = gradient
        else:
            self._put([self._place_of(index)], [gradient.view(-1)])
        self._arrived.add(index)
        self._gradient.reached.add(index)
        return len(self._arrived) == len(self._layout.params)

    def fill_missing(self) -> None:
        """Writes zeros for gradients that have not come. Sums of earlier micro-batches need none: a missing gradient adds nothing."""
        missing = [index for index in range(len(self._layout.params)) if index not in self._arrived]
        if missing and not self._adds:
            torch._foreach_zero_([self._place_of(index) for index in missing])

    def complete(self) -> Regions:
        """The values of the whole unit, ready to descend. What is collected next belongs to the next micro-batch."""
        if self._small:
            self._put([self._place_of(index) for index in self._small], list(self._small.values()))
        if self._has_sums and not self._adds:
            self._clear_paddings(self._gradient.total)  # after a skipped step they are NaN
        self._small.clear()
        self._arrived.clear()
        self._adds = self._has_sums
        return self._gradient.resting if self._has_sums else Regions.of(self._taken_buffer(), self._layout.runs)

    def start_step(self) -> None:
        """Begins a step: the next micro-batch is its first."""
        self._adds = False
        self._gradient.reached.clear()

    def release(self) -> None:
        """Gives the buffer back. The descent that reads it must have ended."""
        if self._buffer is not None:
            self._staging.give(self._buffer.view(torch.uint8))
        self._buffer = None

    def _put(self, places: list[Tensor], gradients: list[Tensor]) -> None:
        """Copies or adds every gradient to its place, all in one call; a copy is one kernel on a GPU."""
        if self._adds:
            torch._foreach_add_(places, gradients)
        else:
            torch._foreach_copy_(places, gradients)

    def _place_of(self, index: int) -> Tensor:
        param = self._layout.params[index]
        flat = self._gradient.total if self._has_sums else self._taken_buffer()
        return flat[param.offset : param.offset + param.numel]

    def _taken_buffer(self) -> Tensor:
        if self._buffer is None:
            self._buffer = self._staging.take(self._layout.numel * self._dtype.itemsize).view(self._dtype)
            self._clear_paddings(self._buffer)
        return self._buffer

    def _clear_paddings(self, flat: Tensor) -> None:
        if self._paddings:
            torch._foreach_zero_([flat[padding.start : padding.stop] for padding in self._paddings])
