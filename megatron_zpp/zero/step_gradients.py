"""How far the gradients of a step are."""

from __future__ import annotations

import enum


class StepGradients(enum.Enum):
    """The gradients of a step.

    NONE: there are none yet. SOME: those of some micro-batches. ALL: those of all, which may still descend. MEAN: their mean, ready for the
    update. BROKEN: unusable, because a backward failed.
    """

    NONE = "none"
    SOME = "some"
    ALL = "all"
    MEAN = "mean"
    BROKEN = "broken"
