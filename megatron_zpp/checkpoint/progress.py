"""Position of a run between two iterations, which its checkpoints keep."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.data.reading import Reading


@dataclass
class Progress:
    """Position of a run.

    consumed_samples, consumed_tokens: of all steps. scheduled_samples, scheduled_tokens: of the steps that were not skipped; learning rate
    and weight decay follow them. ordered_samples: samples of the training data that the run has put in order, which its next runs keep;
    0 if that is not known. readings: which data the run has read so far; empty if that is not known.
    """

    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0
    ordered_samples: int = 0
    consumed_tokens: int = 0
    scheduled_tokens: int = 0
    readings: tuple[Reading, ...] = ()

    def advance(self, samples: int, seq_length: int, *, is_skipped: bool) -> None:
        """Counts one more iteration of `samples` samples of seq_length tokens."""
        self.iteration += 1
        self.consumed_samples += samples
        self.consumed_tokens += samples * seq_length
        if not is_skipped:
            self.scheduled_samples += samples
            self.scheduled_tokens += samples * seq_length

    def scheduled(self, tokens_per_sample: int | None) -> float:
        """Samples of the steps that were not skipped; with tokens_per_sample their tokens, as samples of this many."""
        return self.scheduled_samples if tokens_per_sample is None else self.scheduled_tokens / tokens_per_sample
