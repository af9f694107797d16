"""The parts of a unit that AdamW takes as its parameters: one view of the main weights per range of equal weight decay.

Views begin where blocks do, at multiples of 32 elements, so every stage gets the same bits wherever its views end. At other places they
would differ: torch's fused kernels round the last elements of a view differently if they do not fill one of their vectors.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megatron_zpp.comm.codec import Regions
from megatron_zpp.zero.adam import AdamParameters
from megatron_zpp.zero.unit import WeightUnit


def adam_views(unit: WeightUnit, gradient: Regions, moments: Mapping[str, Tensor]) -> AdamParameters:
    """Views of the unit's main weights, with those of its gradient and its moments.

    Raises ValueError if weight decay changes where no block begins.
    """
    states: dict[bool, dict[nn.Parameter, dict[str, Tensor]]] = {True: {}, False: {}}
    for span, decays in unit.layout.ranges_by(lambda segment: segment.spec.weight_decay, unit.first_slice, unit.slices):
        if span.start % unit.layout.block_numel:
            raise ValueError(
                f"unit {unit.name}: weight decay changes at element {span.start} of the slice, and AdamW's views begin at multiples of "
                f"{unit.layout.block_numel}; give all parameters of one dimension the same weight decay"
            )
        parameter = nn.Parameter(unit.main_weight[span.start : span.stop])
        parameter.grad = gradient.range(span.start, span.stop)
        states[decays][parameter] = {name: moment[span.start : span.stop] for name, moment in moments.items()}
    return AdamParameters(decayed=states[True], others=states[False])
