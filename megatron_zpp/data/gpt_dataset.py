"""Samples of one corpus in the order of its GPT indices."""

import numpy as np

from megatron_zpp.data.gpt_indices import GPTIndices
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.sample import Sample, sample_from


class GPTDataset:
    """Sample i is the run of seq_length + 1 tokens from where sample shuffle[i] starts to the first token of the next."""

    def __init__(self, source: IndexedDataset, indices: GPTIndices) -> None:
        self.source = source
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.source.prefix}")
        return sample_from(self._stream(int(self.indices.shuffle[index])))

    def _stream(self, sample: int) -> np.ndarray:
        first, first_offset = (int(value) for value in self.indices.sample[sample])
        last, last_offset = (int(value) for value in self.indices.sample[sample + 1])
        pieces = []
        for position in range(first, last + 1):
            start = first_offset if position == first else 0
            stop = last_offset + 1 if position == last else None
            pieces.append(self.source.read(int(self.indices.document[position]), start, stop))
        return np.concatenate(pieces)
