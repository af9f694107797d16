"""The two loops over all samples of a run, in C++ (csrc/data) if the kernels are built, else in numpy. Both give identical numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

NUMPY_ROWS = 1 << 20  # samples that numpy places at a time


def cut_samples(lengths: np.ndarray, document_index: np.ndarray, *, sample_count: int, seq_length: int) -> np.ndarray:
    """Where each sample starts and the last one ends: position in document_index, and offset in that document.

    lengths: [documents] int32, in tokens. document_index: [positions] int32.
    Returns [sample_count + 1, 2] int32, or int64 if a position or an offset may need it.
    Raises RuntimeError if the stream has no token number sample_count * seq_length.
    """
    fits_int32 = max(len(document_index), int(lengths.max())) < np.iinfo(np.int32).max
    samples = np.empty((sample_count + 1, 2), dtype=np.int32 if fits_int32 else np.int64)
    if uses_kernels():
        import torch

        arrays = (_tensor(lengths), _tensor(document_index))
        torch.ops.megatron_zpp.build_sample_index(*arrays, seq_length, torch.from_numpy(samples))
    else:
        _cut_samples_in_numpy(lengths, document_index, seq_length, samples)
    return samples


def deal_samples(weights: np.ndarray, sample_count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each sample of a blend: the number of its dataset, and the number of the sample in that dataset.

    weights: [datasets] fp64 with sum 1. Each sample comes from the dataset that is furthest behind its share, the first one if several are.
    Returns two arrays [sample_count]: int16 (int32 for more than 32,767 datasets) and int64.
    """
    dataset_index = np.empty(sample_count, dtype=np.int16 if len(weights) <= np.iinfo(np.int16).max else np.int32)
    dataset_sample = np.empty(sample_count, dtype=np.int64)
    if uses_kernels():
        import torch

        torch.ops.megatron_zpp.build_blend_index(_tensor(weights), torch.from_numpy(dataset_index), torch.from_numpy(dataset_sample))
    else:
        _deal_samples_in_numpy(weights, dataset_index, dataset_sample)
    return dataset_index, dataset_sample


def uses_kernels() -> bool:
    """Whether indices are built in C++ on this machine."""
    from megatron_zpp.ops import extension  # imports torch, which is not needed to load indices

    return extension.load()


def _tensor(values: np.ndarray) -> torch.Tensor:
    import torch

    # Arrays that were read from a file are not writable, which torch requires.
    return torch.from_numpy(np.require(values, requirements=("C", "A", "W", "O")))


def _cut_samples_in_numpy(lengths: np.ndarray, document_index: np.ndarray, seq_length: int, samples: np.ndarray) -> None:
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    if len(samples) > 1 and (len(samples) - 1) * seq_length >= ends[-1]:
        raise RuntimeError(f"the stream of {ends[-1]} tokens ends before sample {len(samples) - 1} starts")
    for first in range(0, len(samples), NUMPY_ROWS):
        rows = samples[first : first + NUMPY_ROWS]
        starts = np.arange(first, first + len(rows), dtype=np.int64) * seq_length
        positions = np.searchsorted(ends, starts, side="right")
        rows[:, 0] = positions
        rows[:, 1] = starts - (ends[positions] - lengths[document_index[positions]])
    # Megatron starts at position 0 even if the first documents are empty.
    samples[0] = 0


def _deal_samples_in_numpy(weights: np.ndarray, dataset_index: np.ndarray, dataset_sample: np.ndarray) -> None:
    drawn = np.zeros(len(weights), dtype=np.int64)
    for sample in range(len(dataset_index)):
        furthest = int(np.argmax(weights * float(max(sample, 1)) - drawn))
        dataset_index[sample] = furthest
        dataset_sample[sample] = drawn[furthest]
        drawn[furthest] += 1
