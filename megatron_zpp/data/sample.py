"""What a dataset gives for one index."""

from typing import Protocol, TypedDict

import numpy as np


class Sample(TypedDict):
    tokens: np.ndarray  # [seq_length] int64
    labels: np.ndarray  # [seq_length] int64, the token after each token
    loss_mask: np.ndarray  # [seq_length] fp32, 1 where the loss counts


class SampleSource(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def sample_from(stream: np.ndarray) -> Sample:
    """The sample of seq_length + 1 consecutive tokens: inputs, labels one further, every position in the loss."""
    stream = stream.astype(np.int64)
    return {"tokens": stream[:-1], "labels": stream[1:], "loss_mask": np.ones(len(stream) - 1, dtype=np.float32)}
