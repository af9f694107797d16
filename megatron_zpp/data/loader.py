"""Micro-batches as tensors, read ahead by worker processes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_zpp.data.sample import SampleSource
from megatron_zpp.data.sampler import MicroBatchIndices, MicroBatchSampler


@dataclass(frozen=True)
class MicroBatch:
    tokens: Tensor  # [B, S] int64
    labels: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] fp32
    first_sample: int  # number of its first sample, counted over the whole run


def build_loader(dataset: SampleSource, sampler: MicroBatchSampler, num_workers: int) -> Iterator[MicroBatch]:
    """The sampler's micro-batches in its order, without end; the same tensors for every num_workers (0: in this process)."""
    batches = _MicroBatches(dataset)
    if num_workers == 0:
        return (batches[indices] for indices in sampler)
    # A generator of its own: DataLoader would draw from torch's global one.
    return iter(DataLoader(batches, sampler=sampler, batch_size=None, num_workers=num_workers, generator=torch.Generator()))


class _MicroBatches(Dataset[MicroBatch]):
    def __init__(self, samples: SampleSource) -> None:
        self.samples = samples

    def __getitem__(self, indices: MicroBatchIndices) -> MicroBatch:
        samples = [self.samples[index] for index in indices.samples]
        return MicroBatch(
            tokens=torch.from_numpy(np.stack([sample["tokens"] for sample in samples])),
            labels=torch.from_numpy(np.stack([sample["labels"] for sample in samples])),
            loss_mask=torch.from_numpy(np.stack([sample["loss_mask"] for sample in samples])),
            first_sample=indices.first_sample,
        )
