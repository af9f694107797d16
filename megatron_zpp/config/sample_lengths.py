"""Tokens per sample of a run, which may go on from a checkpoint with another --seq-length; lengths in tokens as samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleLengths:
    """Tokens of each sample of a run.

    seq_length: of the samples from now on. earlier: of those before, in order: how many samples had how many tokens each.
    """

    seq_length: int
    earlier: tuple[tuple[int, int], ...] = ()

    def tokens_in(self, samples: int) -> int:
        """Tokens in the first `samples` samples of the run."""
        tokens = 0
        for count, length in self.earlier:
            taken = min(samples, count)
            tokens, samples = tokens + taken * length, samples - taken
        return tokens + samples * self.seq_length

    def samples_within(self, tokens: int) -> int:
        """Whole samples in the first `tokens` tokens of the run."""
        samples = 0
        for count, length in self.earlier:
            if tokens < count * length:
                return samples + tokens // length
            samples, tokens = samples + count, tokens - count * length
        return samples + tokens // self.seq_length

    def samples_for(self, tokens: int) -> int:
        """Samples after which the run has had `tokens` tokens or more."""
        samples = self.samples_within(tokens)
        return samples + (self.tokens_in(samples) < tokens)

    def present_samples(self, tokens: int) -> int:
        """How many samples of the present length have `tokens` tokens, rounded up."""
        return -(-tokens // self.seq_length)


def merged(stages: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Counts of samples, each with their tokens, of which neighbours of one length are one and none is empty."""
    found: list[tuple[int, int]] = []
    for count, length in stages:
        if count and found and found[-1][1] == length:
            found[-1] = (found[-1][0] + count, length)
        elif count:
            found.append((count, length))
    return tuple(found)
