"""The parts of a unit that AdamW takes as its parameters: one view of the main weights per range that is updated alike.

Views begin where blocks do, at multiples of 32 elements, so every stage gets the same bits wherever its views end. At other places they
would differ: torch's fused kernels round the last elements of a view differently if they do not fill one of their vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_zpp.comm.codec import Regions
from megatron_zpp.config.flag import next_multiple
from megatron_zpp.zero.unit import WeightUnit


@dataclass(frozen=True)
class AdamView:
    """A range of a unit's main weights as a parameter with its gradient, and its moments.

    decays: whether its weights decay. steps: the number of its updates so far.
    copied: if the parameter and its moments are copies, the tensors of the unit. counts: the part of a copy that goes back to the unit.
    """

    parameter: nn.Parameter
    moments: dict[str, Tensor]
    decays: bool
    steps: int
    copied: tuple[Tensor, ...]
    counts: slice

    def before_update(self) -> None:
        """Fills copies."""
        for own, of_unit in self._copies():
            own.copy_(of_unit)

    def after_update(self) -> None:
        """Takes the part of copies that counts back to the unit."""
        for own, of_unit in self._copies():
            of_unit[self.counts] = own[self.counts]

    def _copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip((self.parameter.detach(), *self.moments.values()) if self.copied else (), self.copied, strict=True)


def adam_views(unit: WeightUnit, gradient: Regions, moments: Mapping[str, Tensor], steps: Mapping[str, int]) -> Iterator[AdamView]:
    """The views of a unit. steps: by parameter, the number of its updates so far; parameters without one are not updated.

    Parameters of one dimension share blocks. Where neighbours have had different numbers of updates, each gets a copy of its blocks.
    Raises ValueError if weight decay changes where no block begins.
    """
    layout, slices = unit.layout, (unit.first_slice, unit.slices)
    for span, _ in layout.ranges_by(lambda segment: segment.spec.weight_decay, *slices):
        if span.start % layout.block_numel:
            raise ValueError(
                f"unit {unit.name}: weight decay changes at element {span.start} of the slice, and AdamW's views begin at multiples of "
                f"{layout.block_numel}; give all parameters of one dimension the same weight decay"
            )
    states = (unit.main_weight, *moments.values())
    for part, (decays, updates) in layout.ranges_by(lambda segment: (segment.spec.weight_decay, steps.get(segment.spec.name)), *slices):
        if updates is None:
            continue
        blocks = slice(part.start // layout.block_numel * layout.block_numel, next_multiple(part.stop, layout.block_numel))
        is_copy = blocks != slice(part.start, part.stop)
        of_unit = tuple(state[blocks] for state in states)
        weight, *own = [state.clone() for state in of_unit] if is_copy else of_unit
        parameter = nn.Parameter(weight)
        parameter.grad = gradient.range(blocks.start, blocks.stop)
        counts = slice(part.start - blocks.start, part.stop - blocks.start)
        yield AdamView(parameter, dict(zip(moments, own, strict=True)), decays, updates, of_unit if is_copy else (), counts)
