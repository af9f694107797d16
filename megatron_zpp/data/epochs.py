"""How often a run reads the tokens of a corpus, as in Megatron (no torch)."""

from typing import NamedTuple

# Megatron's threshold: if a smaller part of the last epoch is needed, it is shuffled separately, so that its samples are not mixed into the
# other epochs.
SEPARATE_FINAL_EPOCH_BELOW = 0.80


class Epochs(NamedTuple):
    repeats: int
    sample_count: int  # in all epochs together
    shuffled_apart_from: int | None  # first sample of the last epoch if that is shuffled separately


def plan_epochs(tokens_per_epoch: int, *, sample_count: int, seq_length: int) -> Epochs:
    """How often the tokens must be repeated for sample_count samples of seq_length tokens plus one last token."""
    repeats = max(1, -(-(sample_count * seq_length + 1) // tokens_per_epoch))
    total = (repeats * tokens_per_epoch - 1) // seq_length
    before_final = ((repeats - 1) * tokens_per_epoch - 1) // seq_length
    samples_per_epoch = (tokens_per_epoch - 1) // seq_length
    is_separate = repeats > 1 and sample_count - before_final < int(SEPARATE_FINAL_EPOCH_BELOW * samples_per_epoch)
    return Epochs(repeats, total, before_final if is_separate else None)
