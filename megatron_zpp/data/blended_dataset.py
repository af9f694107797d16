"""A dataset that draws from several corpora, and a count of samples per corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_zpp.data.gpt_dataset import GPTDataset, Sample, SampleSource, TokenPlaces
from megatron_zpp.data.index_builders import deal_samples
from megatron_zpp.data.reading import CorpusOrder
from megatron_zpp.data.stored_array import Rows


class BlendIndices(NamedTuple):
    dataset: Rows  # [samples] int16, or int32 if there are too many datasets
    dataset_sample: Rows  # [samples] int64
    drawn: Rows  # [datasets] int64, samples of each dataset in the whole blend


BYTES_PER_SAMPLE = 2 + 8  # of the two long arrays, at least


def build_blend_indices(weights: Sequence[float], sample_count: int) -> BlendIndices:
    """The indices of a blend of sample_count samples, identical to Megatron's. weights: one per dataset, with sum 1."""
    dataset_index, dataset_sample = deal_samples(np.array(weights, dtype=np.float64), sample_count)
    return BlendIndices(dataset_index, dataset_sample, np.bincount(dataset_index, minlength=len(weights)).astype(np.int64))


class BlendedDataset:
    """Sample i is sample dataset_sample[i] of dataset number dataset[i].

    Raises RuntimeError if a dataset has fewer samples than the indices draw of it.
    """

    def __init__(self, datasets: Sequence[GPTDataset], indices: BlendIndices) -> None:
        self.datasets = tuple(datasets)
        self.indices = indices
        for dataset, count in zip(self.datasets, indices.drawn.tolist(), strict=True):
            if count > len(dataset):
                raise RuntimeError(f"the blend draws {count} samples of {dataset.source.prefix}, which was built for {len(dataset)}")

    def __len__(self) -> int:
        return len(self.indices.dataset)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in a blend of {len(self.datasets)} datasets")
        return self.datasets[int(self.indices.dataset[index])][int(self.indices.dataset_sample[index])]

    def places_of(self, index: int) -> TokenPlaces:
        """Where the tokens of sample `index` are, without the last label."""
        return self.datasets[int(self.indices.dataset[index])].places_of(int(self.indices.dataset_sample[index]))

    def orders(self) -> tuple[CorpusOrder, ...]:
        return tuple(dataset.order for dataset in self.datasets)

    def count_by_source(self, start: int, stop: int) -> Counter[str]:
        """How many of samples [start, stop) come from each corpus, by its prefix."""
        counts = np.bincount(self.indices.dataset[start:stop], minlength=len(self.datasets)).tolist()
        total: Counter[str] = Counter()
        for dataset, count in zip(self.datasets, counts, strict=True):
            total[dataset.source.prefix] += count
        return total


class SourceTally:
    """Counts how many samples of the run come from each corpus. Each call counts on from the previous one."""

    def __init__(self, dataset: SampleSource) -> None:
        self._dataset = dataset
        self._counted = 0
        self._by_source: Counter[str] = Counter()

    def up_to(self, consumed_samples: int) -> dict[str, int]:
        """The count by prefix over the first consumed_samples samples of the run, including those before it was resumed.

        Past its end a dataset starts over.
        """
        dataset = self._dataset
        while self._counted < consumed_samples:
            first = self._counted % len(dataset)
            count = min(consumed_samples - self._counted, len(dataset) - first)
            if isinstance(dataset, BlendedDataset):
                self._by_source.update(dataset.count_by_source(first, first + count))
            else:
                self._by_source[dataset.source.prefix if isinstance(dataset, GPTDataset) else "mock data"] += count
            self._counted += count
        return dict(self._by_source)
