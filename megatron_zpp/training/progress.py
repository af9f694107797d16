"""Position of a run between two iterations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Position of a run, which its checkpoints keep.

    scheduled_samples: samples of the steps that were not skipped. Learning rate and weight decay follow them.
    ordered_samples: samples of the training data that the run has put in order, which its next runs keep.
    """

    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0
    ordered_samples: int = 0

    def advance(self, samples: int, *, is_skipped: bool) -> None:
        self.iteration += 1
        self.consumed_samples += samples
        if not is_skipped:
            self.scheduled_samples += samples
