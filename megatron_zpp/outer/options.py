"""The options of outer steps, and which units are due in which of them (no torch)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zpp.comm.code import Code
from megatron_zpp.config.defaults import default_outer_lr
from megatron_zpp.system.user_error import UserError


@dataclass(frozen=True)
class OuterOptions:
    """How islands agree on weights (DiLoCo, arXiv 2311.08105).

    period: H, the inner steps from one exchange of a unit to its next.
    learning_rate: of the outer step. Default: period / 40, at most 0.7. momentum: of Nesterov's form of the outer step.
    start_iteration: until then, all units take the plain mean over the islands after every inner step. Choose the end of the learning
    rate's warm-up: momentum that has seen a warm-up alone throws the model away.
    gradient_code: in which outer gradients cross. What it loses is lost, so by default it has no bias (two rounds of rotation).
    difference_code: in which changes of the outer weights cross. What it loses is a part of the next change.
    overlap_steps: 0 or 1. With 1 an exchange is under way during the next inner step, too, and the island keeps what it learns in it. At
    most two units are late; if more are due together, the others are waited for.
    is_staggered: whether units take turns, so that every inner step moves about 1/H of the model (arXiv 2501.18512). Otherwise all are due
    in the same step.
    Raises UserError for numbers out of range.
    """

    period: int = 16
    learning_rate: float | None = None
    momentum: float = 0.9
    start_iteration: int = 0
    gradient_code: Code = Code.gaussian(3, rounds=2)
    difference_code: Code = Code.gaussian(3, rounds=1)
    overlap_steps: int = 0
    is_staggered: bool = True

    def __post_init__(self) -> None:
        if type(self.period) is not int or self.period < 1:
            raise UserError(f"the period of outer steps is {self.period!r}; choose a number of inner steps, 1 or more")
        if self.learning_rate is not None and not (_is_number(self.learning_rate) and 0 < self.learning_rate < math.inf):
            raise UserError(f"the learning_rate of outer steps is {self.learning_rate!r}; choose a positive number, or leave it out")
        if not (_is_number(self.momentum) and 0 <= self.momentum < 1):
            raise UserError(f"the momentum of outer steps is {self.momentum!r}; choose 0 or more, and less than 1")
        if type(self.start_iteration) is not int or self.start_iteration < 0:
            raise UserError(f"the start_iteration of outer steps is {self.start_iteration!r}; choose a number of inner steps, 0 or more")
        if type(self.overlap_steps) is not int or not 0 <= self.overlap_steps <= 1:
            raise UserError(f"the overlap_steps of outer steps are {self.overlap_steps!r}; choose 0 or 1")
        for name in ("gradient_code", "difference_code"):
            if not isinstance(getattr(self, name), Code):
                raise UserError(f"the {name} of outer steps is {getattr(self, name)!r}; choose a megatron_zpp.Code")
        if type(self.is_staggered) is not bool:
            raise UserError(f"is_staggered of outer steps is {self.is_staggered!r}; choose True or False")

    @property
    def outer_rate(self) -> float:
        """The learning rate, also where it is left to the period."""
        return default_outer_lr(self.period) if self.learning_rate is None else self.learning_rate

    def takes_means(self, iteration: int) -> bool:
        """Whether the exchange after this many inner steps takes the plain mean over the islands."""
        return iteration <= self.start_iteration

    def is_due(self, numels: Sequence[int], iteration: int) -> list[bool]:
        """For each unit, whether it is exchanged after this many inner steps. numels: elements of each unit, in the order of the units.

        A unit is due every `period` steps. If units are staggered, a unit with the share s of all elements before it is due s x period
        steps before the first unit, so its first exchange comes before the first period is over. While means are taken, all are due.
        Before the first step none is.
        """
        if iteration == 0 or self.takes_means(iteration):
            return [iteration > 0] * len(numels)
        total, before, due = sum(numels), 0, []
        for numel in numels:
            offset = self.period * before // total if self.is_staggered else 0
            due.append((iteration + offset) % self.period == 0)
            before += numel
        return due


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
