"""Decides which samples each rank sees, and in which order.

Samples are numbered over the whole run. A global batch takes the next consecutive samples and deals them to the ranks micro-batch by
micro-batch. Ranks that divide samples, their sample group, count as one here. Example: 2 ranks, micro-batches of 2, global batches of 8:

    sample       0  1 | 2  3 | 4  5 | 6  7 || 8  9 | 10 11 | ...
    rank         0      1      0      1       0       1
    micro-batch  0      0      1      1       0       0

So a single process with micro-batches of 2 sees the same micro-batches, and a run that has consumed n samples resumes at sample n with
any number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_zpp.system.user_error import UserError


class MicroBatchIndices(NamedTuple):
    first_sample: int  # number of the first sample, counted over the whole run, even if the dataset starts over
    samples: tuple[int, ...]  # indices into the dataset
    padding: int = 0  # this many of the last samples only fill the micro-batch and do not count


@dataclass(frozen=True)
class MicroBatchSampler:
    """This rank's micro-batches from sample consumed_samples on, without end. After total_samples the dataset starts over."""

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    sample_group: int
    sample_groups: int

    def __post_init__(self) -> None:
        if self.total_samples <= 0:
            raise UserError("The dataset has no sample; give more data, a smaller --seq-length or another --split.")
        if not 0 <= self.sample_group < self.sample_groups:
            raise RuntimeError(f"sample group {self.sample_group} of {self.sample_groups}")
        if self.micro_batch_size <= 0 or self.consumed_samples < 0:
            raise RuntimeError(f"micro-batches of {self.micro_batch_size} samples after {self.consumed_samples}")

    def __iter__(self) -> Iterator[MicroBatchIndices]:
        first = self.consumed_samples + self.sample_group * self.micro_batch_size
        while True:
            yield MicroBatchIndices(first, tuple(i % self.total_samples for i in range(first, first + self.micro_batch_size)))
            first += self.sample_groups * self.micro_batch_size


@dataclass(frozen=True)
class WholePassSampler:
    """This rank's micro-batches of passes over all samples, one pass after another, without end.

    In each pass every rank has the same number of full micro-batches. If the samples run out, the last one is repeated as padding.
    Example: 2 ranks, micro-batches of 2, 5 samples, `-` for padding:

        sample       0  1 | 2  3 | 4  - | -  - || 0  1 | ...
        rank         0      1      0      1       0
    """

    total_samples: int
    micro_batch_size: int
    sample_group: int
    sample_groups: int

    def __post_init__(self) -> None:
        if self.total_samples <= 0:
            raise UserError("The validation set has no complete sample; give more data, or a smaller --seq-length.")

    @property
    def microbatches(self) -> int:
        """Micro-batches of each rank in one pass."""
        return -(-self.total_samples // (self.micro_batch_size * self.sample_groups))

    def __iter__(self) -> Iterator[MicroBatchIndices]:
        while True:
            for index in range(self.microbatches):
                first = (index * self.sample_groups + self.sample_group) * self.micro_batch_size
                numbers = range(first, first + self.micro_batch_size)
                samples = tuple(min(number, self.total_samples - 1) for number in numbers)
                yield MicroBatchIndices(first, samples, sum(number >= self.total_samples for number in numbers))
