"""Samples and the datasets that yield them: from one corpus, from generated tokens, and from a chain of datasets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, TypedDict

import numpy as np

from megatron_zpp.data.gpt_indices import GPTIndices
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.reading import CorpusOrder


class Sample(TypedDict):
    """The tokens of one sample, the labels to predict, and which of them count."""

    tokens: np.ndarray  # [seq_length] int64
    labels: np.ndarray  # [seq_length] int64, the token after each token
    loss_mask: np.ndarray  # [seq_length] fp32, 1 where the loss counts


class SampleSource(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def orders(self) -> tuple[CorpusOrder, ...]: ...


class TokenPlaces(NamedTuple):
    """Tokens of a corpus by their documents and their offsets in them."""

    source: IndexedDataset
    documents: np.ndarray  # [tokens] int32
    offsets: np.ndarray  # [tokens] int64


def sample_from(stream: np.ndarray) -> Sample:
    """The sample from seq_length + 1 consecutive tokens. Labels are the inputs shifted by one; every position counts in the loss."""
    stream = stream.astype(np.int64)
    return {"tokens": stream[:-1], "labels": stream[1:], "loss_mask": np.ones(len(stream) - 1, dtype=np.float32)}


class GPTDataset:
    """The samples of one corpus; len() is their number, and dataset[i] is sample i.

    Sample i has the seq_length + 1 tokens from the start of sample shuffle[i] up to the first token of the sample after it.
    order: what the indices were made from.
    """

    def __init__(self, source: IndexedDataset, indices: GPTIndices, order: CorpusOrder) -> None:
        self.source = source
        self.indices = indices
        self.order = order

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.source.prefix}")
        return sample_from(self._stream(int(self.indices.shuffle[index])))

    def _stream(self, sample: int) -> np.ndarray:
        (first, first_offset), (last, last_offset) = self.indices.sample[sample : sample + 2].tolist()
        return self.source.read_in_turn(self.indices.document[first : last + 1].tolist(), first_offset, last_offset + 1)

    def places_of(self, index: int) -> TokenPlaces:
        """Where the tokens of sample `index` are, without the last label."""
        sample = int(self.indices.shuffle[index])
        (first, begin), (last, end) = self.indices.sample[sample : sample + 2].tolist()
        documents = self.indices.document[first : last + 1]
        stops = [*(int(self.source.lengths[document]) for document in documents[:-1].tolist()), end]
        starts = [begin, *([0] * (len(documents) - 1))]
        offsets = [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
        return TokenPlaces(self.source, np.repeat(documents, [len(part) for part in offsets]), np.concatenate(offsets))

    def orders(self) -> tuple[CorpusOrder, ...]:
        """What decides the order of the samples: one for each corpus."""
        return (self.order,)


# A model learns few ids quickly, whatever the size of the vocabulary.
MAX_DISTINCT_TOKENS = 512
MAX_STEP = 3


class MockDataset:
    """Sample i counts up from a random id by a random step. It depends on (seed, stream, i) only.

    stream: distinguishes training, validation and test. `len` is the number of samples requested, but every i >= 0 has a sample.
    """

    def __init__(self, *, seed: int, stream: int, seq_length: int, vocab_size: int, sample_count: int) -> None:
        self.seed = seed
        self.stream = stream
        self.seq_length = seq_length
        self.distinct_tokens = min(vocab_size, MAX_DISTINCT_TOKENS)
        self.sample_count = sample_count

    def __len__(self) -> int:
        return self.sample_count

    def __getitem__(self, index: int) -> Sample:
        # numpy guarantees the values of SeedSequence across versions, but not those of its generators.
        start, step = np.random.SeedSequence([self.seed, self.stream, index]).generate_state(2, np.uint32).tolist()
        positions = np.arange(self.seq_length + 1, dtype=np.int64)
        return sample_from((start + positions * (1 + step % MAX_STEP)) % self.distinct_tokens)

    def orders(self) -> tuple[CorpusOrder, ...]:
        return ()


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

    def orders(self) -> tuple[CorpusOrder, ...]:
        return tuple(order for dataset in self.datasets for order in dataset.orders())
