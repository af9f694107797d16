"""Count of consecutive steps without a usable loss or gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from megatron_zpp.training.progress import Progress
from megatron_zpp.training.step import StepOutcome


@dataclass
class BadIterations:
    """Steps without a usable loss or gradient since the last good one.

    progress_before, scaler_before: states of the run and of its loss scaler before the first of them.
    weights_are_from_before: whether all of them were skipped.
    """

    consecutive: int = 0
    weights_are_from_before: bool = True
    progress_before: Progress = field(default_factory=Progress)
    scaler_before: dict[str, float] = field(default_factory=dict)

    def count(self, outcome: StepOutcome, progress: Progress, scaler: dict[str, float]) -> None:
        """Counts a step. progress, scaler: states of the run and of its loss scaler before the step."""
        if math.isfinite(outcome.lm_loss) and not outcome.is_skipped:
            self.consecutive, self.weights_are_from_before = 0, True
            return
        if self.consecutive == 0:
            self.progress_before, self.scaler_before = replace(progress), scaler
        self.consecutive += 1
        self.weights_are_from_before &= outcome.is_skipped
