"""The ZeRO family as one table: a member is a row that says on which rung each state rests (pure data, no torch).

The engine reads the row and nothing else; a row that no flag offers works as well.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Rung(enum.IntEnum):
    """How far a state is spread, from one slice per rank up to the whole unit on every rank."""

    PRIMARY = 0  # 1/W on every rank
    SECONDARY = 1  # 1/G on every rank, the same in every node
    FULL = 2  # the whole unit on every rank


@dataclass(frozen=True)
class Policy:
    """One row: where states rest.

    optimizer: PRIMARY, or FULL where every rank updates every weight.
    gradients: between micro-batches; fp32 sums.
    weights_between_steps, weights_in_step: after the optimizer step, and between the uses within a step.
    Raises ValueError for a combination that has no meaning.
    """

    optimizer: Rung
    gradients: Rung
    weights_between_steps: Rung
    weights_in_step: Rung

    def __post_init__(self) -> None:
        if self.optimizer is Rung.SECONDARY:
            raise ValueError("the optimizer rests on the primary or the full rung; choose one of these")
        if self.optimizer is Rung.FULL and (self.gradients, self.weights_in_step) != (Rung.FULL, Rung.FULL):
            raise ValueError("an optimizer on the full rung needs gradients and weights on the full rung")
        if self.weights_in_step < self.weights_between_steps:
            raise ValueError(f"weights that rest on the {self.weights_between_steps.name} rung between steps cannot rest lower within one")


POLICIES: dict[int, Policy] = {
    0: Policy(Rung.FULL, Rung.FULL, Rung.FULL, Rung.FULL),
    1: Policy(Rung.PRIMARY, Rung.FULL, Rung.FULL, Rung.FULL),
    2: Policy(Rung.PRIMARY, Rung.PRIMARY, Rung.FULL, Rung.FULL),
    3: Policy(Rung.PRIMARY, Rung.PRIMARY, Rung.PRIMARY, Rung.PRIMARY),
}
