"""Several datasets one after the other, each whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from megatron_zpp.data.sample import Sample, SampleSource


class ChainedDataset:
    """All samples of the first dataset, then all of the second, and so on."""

    def __init__(self, datasets: Sequence[SampleSource]) -> None:
        self.datasets = tuple(datasets)
        self._ends = list(accumulate(len(dataset) for dataset in self.datasets))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in a chain of {len(self.datasets)} datasets")
        position = bisect_right(self._ends, index)
        return self.datasets[position][index - (self._ends[position - 1] if position > 0 else 0)]
