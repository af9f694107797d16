"""What a plan of a run is estimated to take, and which of several plans is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_zpp.training.run_plan import RunPlan
from megatron_zpp.zero.plan.time_model import StepTime

WORTHWHILE = 1.03  # a feature with a smaller gain is not recommended


class Sizes(NamedTuple):
    """How many ranks share layers, and how many divide samples."""

    tensor: int
    context: int


class Rate(NamedTuple):
    """The estimates at one rate of the link between nodes: of all members, and of the best of some members for each size of groups."""

    members: list[Estimate]
    by_size: dict[Sizes, Estimate]


@dataclass(frozen=True)
class Estimate:
    """One member of the family at one rate of the link between nodes.

    fits: whether it needs no more memory than there is; None if it may fit, but the memory of a rank is not known. bound_by: the part of
    the machine that is busy longest.
    """

    plan: RunPlan
    gigabits: float
    time: StepTime
    fits: bool | None

    @property
    def may_fit(self) -> bool:
        return self.fits is not False

    @property
    def bound_by(self) -> str:
        busy = self.time.busy
        return max(busy, key=lambda part: busy[part])

    @property
    def waits_for_other_nodes(self) -> bool:
        """Whether the link between nodes is busy longest."""
        return self.time.inter_link == max(self.time.busy.values())


def sizes_of(plan: RunPlan) -> Sizes:
    return Sizes(plan.job.grid.tensor_ranks, plan.job.grid.context_ranks)


def recommended(estimates: Sequence[Estimate]) -> Estimate | None:
    """Among the members that fit and are at most WORTHWHILE times slower than the fastest, the one with the fewest features.

    Lean, whose codes have the fewest bits, counts only if the best of the others waits for other nodes. None if no member fits.
    """
    fitting = [estimate for estimate in estimates if estimate.may_fit]
    others = [estimate for estimate in fitting if not estimate.plan.member.is_lean]
    best = _simplest(others or fitting)
    return _simplest(fitting) if best is not None and best.waits_for_other_nodes else best


def _simplest(estimates: Sequence[Estimate]) -> Estimate | None:
    """The one with the fewest features among those that are almost as fast as the fastest; None if there is none."""
    if not estimates:
        return None
    shortest = min(estimate.time.seconds for estimate in estimates)
    good = [estimate for estimate in estimates if estimate.time.seconds <= WORTHWHILE * shortest]
    return min(good, key=lambda estimate: (estimate.plan.member.features, estimate.plan.memory.total))
