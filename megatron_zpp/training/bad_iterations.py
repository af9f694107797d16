"""Counts consecutive steps without a usable loss or gradient, and ends a run that has too many."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.config.counted import counted
from megatron_zpp.config.schema import Config
from megatron_zpp.training.saving import RunSaver
from megatron_zpp.training.step import StepOutcome
from megatron_zpp.zero.engine import ZeroEngine


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

    def end_run_if_too_many(self, config: Config, engine: ZeroEngine, saver: RunSaver) -> None:
        """Raises RuntimeError after --max-consecutive-bad-iterations in a row. First saves the state from before them, if possible.

        An island ends the run for all, as any rank does that fails.
        """
        limit = config.training.max_consecutive_bad_iterations
        if limit == 0 or self.consecutive < limit:
            return
        raise RuntimeError(
            f"{counted(limit, 'iteration')} in a row (--max-consecutive-bad-iterations) had a NaN or infinite loss or gradient, from "
            f"iteration {self.progress_before.iteration + 1} on; {self._save_state_before(config, engine, saver)}. "
            "Look at their data, or lower --lr."
        )

    def _save_state_before(self, config: Config, engine: ZeroEngine, saver: RunSaver) -> str:
        """Saves the state from before the bad iterations. Returns text that says what was saved, or why nothing was."""
        before = self.progress_before
        if before.iteration == 0:
            return "nothing is saved, because no iteration came before it"
        if not self.weights_are_from_before:
            return "nothing is saved, because one of them has changed the weights: continue from an earlier checkpoint"
        if engine.is_joined:
            return "nothing is saved, because outer steps have gone on meanwhile: continue from an earlier checkpoint"
        if config.checkpoint.save is None:
            return "nothing is saved without --save"
        engine.loss_scaler.load_state(self.scaler_before)
        saver.save(before)
        saver.finish()
        return f"{config.checkpoint.save} holds the state from before, of iteration {before.iteration}"
