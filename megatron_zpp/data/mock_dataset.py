"""Data out of nothing for --mock-data: counting in small steps, which is easy to learn."""

import numpy as np

from megatron_zpp.data.sample import Sample, sample_from

# Few enough ids to be learned quickly, whatever the vocabulary.
MAX_DISTINCT_TOKENS = 512
MAX_STEP = 3


class MockDataset:
    """Sample i counts on from a random id by a random step; a function of (seed, stream, i) alone.

    stream tells training, validation and test apart. `len` says how many samples were asked for; every i >= 0 has its sample.
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
        # SeedSequence keeps its values from one numpy version to the next; the generators built on it need not.
        start, step = np.random.SeedSequence([self.seed, self.stream, index]).generate_state(2, np.uint32).tolist()
        positions = np.arange(self.seq_length + 1, dtype=np.int64)
        return sample_from((start + positions * (1 + step % MAX_STEP)) % self.distinct_tokens)
