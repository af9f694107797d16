"""The parts of a unit that AdamW takes as its parameters: one view of the main weights per range that is updated alike.

Views begin where blocks do, at multiples of 32 elements, so every stage gets the same bits wherever its views end. At other places they
would differ: torch's fused kernels round the last elements of a view differently if they do not fill one of their vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from megatron_zpp.comm.codec import Regions
from megatron_zpp.zero.layout import Range
from megatron_zpp.zero.unit import WeightUnit


@dataclass(frozen=True)
class AdamView:
    """A range of a unit's main weights as a parameter with its gradient, and its moments.

    decays: whether its weights decay. steps: the number of its updates so far.
    copied, parts: if the parameter and its moments are a copy, the tensors of the unit, and the parts of which an update counts.
    """

    parameter: nn.Parameter
    moments: dict[str, Tensor]
    decays: bool
    steps: int
    copied: tuple[Tensor, ...] = ()
    parts: tuple[Range, ...] = ()

    def before_update(self) -> None:
        """Fills a copy."""
        for own, of_unit in zip(self._tensors(), self.copied, strict=False):
            own.copy_(of_unit)

    def after_update(self) -> None:
        """Takes the parts of a copy that count back to the unit."""
        for own, of_unit in zip(self._tensors(), self.copied, strict=False):
            for part in self.parts:
                of_unit[part.start : part.stop] = own[part.start : part.stop]

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.parameter.detach(), *self.moments.values())


def adam_views(unit: WeightUnit, gradient: Regions, moments: Mapping[str, Tensor], steps: Mapping[str, int]) -> Iterator[AdamView]:
    """The views of a unit. steps: by parameter, the number of its updates so far; parameters without one are not updated.

    Parameters of one dimension share blocks. Where they have had different numbers of updates, each number gets a copy of the whole range.
    Raises ValueError if weight decay changes where no block begins.
    """
    layout, slices = unit.layout, (unit.first_slice, unit.slices)
    alike = list(layout.ranges_by(lambda segment: (segment.spec.weight_decay, steps.get(segment.spec.name)), *slices))
    for span, decays in layout.ranges_by(lambda segment: segment.spec.weight_decay, *slices):
        if span.start % layout.block_numel:
            raise ValueError(
                f"unit {unit.name}: weight decay changes at element {span.start} of the slice, and AdamW's views begin at multiples of "
                f"{layout.block_numel}; give all parameters of one dimension the same weight decay"
            )
        by_updates: dict[int, list[Range]] = {}
        for part, (_, updates) in alike:
            if updates is not None and span.start <= part.start < span.stop:
                by_updates.setdefault(updates, []).append(part)
        for updates, parts in by_updates.items():
            is_copy = any(bound % layout.block_numel for part in parts for bound in (part.start, part.stop))
            for part in (span,) if is_copy else parts:
                tensors = [tensor[part.start : part.stop] for tensor in (unit.main_weight, *moments.values())]
                weight, *own = [tensor.clone() for tensor in tensors] if is_copy else tensors
                parameter = nn.Parameter(weight)
                parameter.grad = gradient.range(part.start, part.stop)
                view = AdamView(parameter, dict(zip(moments, own, strict=True)), decays, updates)
                in_copy = tuple(Range(each.start - span.start, each.stop - span.start) for each in parts)
                yield replace(view, copied=tuple(tensors), parts=in_copy) if is_copy else view
