"""Micro-batches as tensors, read ahead by worker processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_all_start_methods

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_zpp.data.documents import DocumentRules
from megatron_zpp.data.gpt_dataset import SampleSource
from megatron_zpp.data.sampler import MicroBatchIndices

MICRO_BATCHES_AHEAD = 2  # per worker


@dataclass(frozen=True)
class MicroBatch:
    tokens: Tensor  # [B, S] int64
    labels: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] fp32
    first_sample: int  # number of its first sample, counted over the whole run
    position_ids: Tensor | None = None  # [B, S] int64, None: each sample counts from 0
    document_lengths: Tensor | None = None  # [D] int64, tokens of the runs that attention stays inside, None: each sample is one


class MicroBatches(Iterator[MicroBatch]):
    """The sampler's micro-batches in its order, without end; the same tensors for every num_workers (0: in this process).

    wait_seconds: what the caller has spent in `next` so far; with workers that keep up it is the time to take a micro-batch over.
    """

    def __init__(self, dataset: SampleSource, sampler: Iterable[MicroBatchIndices], num_workers: int, rules: DocumentRules) -> None:
        self.wait_seconds = 0.0
        self._batches = _in_order(_MicroBatches(dataset, rules), sampler, num_workers)

    def __next__(self) -> MicroBatch:
        started = time.perf_counter()
        batch = next(self._batches)
        self.wait_seconds += time.perf_counter() - started
        return batch


def _in_order(batches: _MicroBatches, sampler: Iterable[MicroBatchIndices], num_workers: int) -> Iterator[MicroBatch]:
    if num_workers == 0:
        yield from (batches[indices] for indices in sampler)
        return
    # Workers start when the first micro-batch is asked for. A generator of its own: DataLoader would draw from torch's global one.
    yield from DataLoader(
        batches,
        sampler=sampler,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=MICRO_BATCHES_AHEAD,
        # A forked worker shares the indices; to one started otherwise they would be sent, and kept, whole.
        multiprocessing_context="fork" if "fork" in get_all_start_methods() else None,
        worker_init_fn=_outlive_signals,
        generator=torch.Generator(),
    )


def _outlive_signals(worker: int) -> None:
    """Launchers send signals to whole process groups; the rank decides when its workers end, and they notice when it is gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


class _MicroBatches(Dataset[MicroBatch]):
    def __init__(self, samples: SampleSource, rules: DocumentRules) -> None:
        self.samples = samples
        self.rules = rules

    def __getitem__(self, indices: MicroBatchIndices) -> MicroBatch:
        samples = [self.samples[index] for index in indices.samples]
        tokens = np.stack([sample["tokens"] for sample in samples])
        loss_mask = np.stack([sample["loss_mask"] for sample in samples])
        loss_mask[len(samples) - indices.padding :] = 0.0
        return MicroBatch(
            tokens=torch.from_numpy(tokens),
            labels=torch.from_numpy(np.stack([sample["labels"] for sample in samples])),
            loss_mask=torch.from_numpy(self.rules.loss_mask(tokens, loss_mask)),
            first_sample=indices.first_sample,
            position_ids=_tensor(self.rules.position_ids(tokens)),
            document_lengths=_tensor(self.rules.document_lengths(tokens)),
        )


def _tensor(values: np.ndarray | None) -> Tensor | None:
    return None if values is None else torch.from_numpy(values)
