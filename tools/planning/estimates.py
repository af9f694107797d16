"""What a plan of a run is estimated to take, and which of several plans is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_zpp.config.schema import Config
from megatron_zpp.training.members import LEAN

if TYPE_CHECKING:  # tools/plan_run.py says why
    from megatron_zpp.training.plan.clock import StepTime
    from megatron_zpp.training.run_plan import RunPlan

WORTHWHILE = 1.03  # a feature with a smaller gain is not recommended
MOST_CHOICES = 3


class Sizes(NamedTuple):
    """How many ranks share layers, and how many divide samples."""

    tensor: int
    context: int

    @property
    def flags(self) -> str:
        return f"--tensor-model-parallel-size {self.tensor} --context-parallel-size {self.context}"


def sizes_of(config: Config) -> Sizes:
    return Sizes(config.distributed.tensor_model_parallel_size, config.distributed.context_parallel_size)


class Simplicity(NamedTuple):
    """Of two plans the simpler one has the smaller number in the first of these fields in which they differ.

    features: of the member, and one for each of the two kinds of groups. node_bytes, intra_bytes: per step, into a node and into a rank.
    """

    features: int
    node_bytes: int
    intra_bytes: int
    memory_bytes: int
    stage: int


# Why a plan is simpler, for each field of Simplicity.
REASONS = ("simpler", "with fewer bytes between nodes", "with fewer bytes inside a node", "in less memory", "in a lower stage")


@dataclass(frozen=True)
class Estimate:
    """One member of the family at one rate of the link between nodes.

    fits: whether it needs no more memory than there is; None if it may fit, but the memory of a rank is not known.
    """

    plan: RunPlan
    time: StepTime
    fits: bool | None

    @property
    def may_fit(self) -> bool:
        return self.fits is not False

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.plan.config)

    @property
    def node_bytes(self) -> int:
        """Bytes that enter a node from others in a step, of all kinds; of outer steps, the mean of a period."""
        return self.plan.node_bytes + self.plan.exchanged_node_bytes + round(self.plan.outer_node_bytes)

    @property
    def simplicity(self) -> Simplicity:
        plan, member = self.plan, self.plan.member
        features = member.features + sum(size > 1 for size in self.sizes)
        return Simplicity(features, self.node_bytes, plan.rank_bytes, plan.memory.total, member.stage)

    @property
    def bound_by(self) -> str:
        """The part of the machine that is busy longest."""
        busy = self.time.busy
        return max(busy, key=lambda part: busy[part])


class Rate(NamedTuple):
    """The estimates at one rate of the link between nodes: with the given sizes of groups, and for every size that was tried."""

    as_given: list[Estimate]
    by_size: dict[Sizes, list[Estimate]]

    @property
    def tried(self) -> list[Estimate]:
        """All estimates, those with the given sizes first."""
        others = (estimates for estimates in self.by_size.values() if estimates is not self.as_given)
        return [*self.as_given, *(estimate for estimates in others for estimate in estimates)]


def fastest(estimates: Sequence[Estimate]) -> Estimate | None:
    """The fastest of those that fit; None if none does."""
    fitting = [estimate for estimate in estimates if estimate.may_fit]
    return min(fitting, key=lambda estimate: (estimate.time.seconds, estimate.simplicity), default=None)


def recommended(estimates: Sequence[Estimate]) -> Estimate | None:
    """The simplest of those that fit and take at most WORTHWHILE times as long as the fastest that fits; None if none fits."""
    best = fastest(estimates)
    if best is None:
        return None
    good = [estimate for estimate in estimates if estimate.may_fit and estimate.time.seconds <= WORTHWHILE * best.time.seconds]
    return min(good, key=lambda estimate: estimate.simplicity)


def choices(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The one that is recommended, then those that would be without the members before them, MOST_CHOICES at most. Lean is one member."""
    left, found = list(estimates), list[Estimate]()
    while len(found) < MOST_CHOICES and (choice := recommended(left)) is not None:
        found.append(choice)
        left = [estimate for estimate in left if _name(estimate) != _name(choice)]
    return found


def _name(estimate: Estimate) -> str:
    return LEAN if estimate.plan.member.is_lean else estimate.plan.member.name
