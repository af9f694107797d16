"""Yields micro-batches as tensors, which worker processes read ahead."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_zpp.data.documents import DocumentRules
from megatron_zpp.data.gpt_dataset import SampleSource
from megatron_zpp.data.sampler import MicroBatchIndices

MICRO_BATCHES_AHEAD = 2  # per worker
LIMITS_OF_WORKERS = (
    "enlarge /dev/shm (docker run --shm-size), allow more processes and open files (ulimit -u, ulimit -n), or give a lower --num-workers"
)
RAISED_IN_A_WORKER = "in DataLoader worker process"  # torch says so where it raises the error of a worker again


@dataclass(frozen=True)
class TokenPart:
    """The tokens that a rank keeps of each sample: part `index` of `count` equal ones."""

    index: int = 0
    count: int = 1


WHOLE = TokenPart()


@dataclass(frozen=True)
class MicroBatch:
    """B samples of S tokens, of each of which the rank has Q; the ranks that divide samples have the others."""

    tokens: Tensor  # [B, Q] int64
    labels: Tensor  # [B, Q] int64
    loss_mask: Tensor  # [B, Q] fp32
    first_sample: int  # number of its first sample, counted over the whole run
    position_ids: Tensor | None = None  # [B, S] int64; None: each sample counts from 0
    document_lengths: Tensor | None = None  # [D] int64, tokens of each run that attention must not leave; None: each sample is a run
    part: TokenPart = WHOLE
    mean_counted: float | None = None  # tokens that count, per rank that divides the samples; None: a rank has whole samples

    def keeping(self, part: TokenPart) -> MicroBatch:
        """The micro-batch of a rank that keeps `part` of each sample, from one of whole samples.

        Raises RuntimeError if the parts are not equal.
        """
        if part.count == 1:
            return self
        length = self.tokens.shape[1]
        if length % part.count:
            raise RuntimeError(f"{part.count} ranks cannot divide samples of {length} tokens (--context-parallel-size)")
        own = slice(part.index * length // part.count, (part.index + 1) * length // part.count)
        return replace(
            self,
            tokens=self.tokens[:, own].contiguous(),
            labels=self.labels[:, own].contiguous(),
            loss_mask=self.loss_mask[:, own].contiguous(),
            part=part,
            mean_counted=max(1.0, float(self.loss_mask.sum())) / part.count,
        )


class MicroBatches(Iterator[MicroBatch]):
    """The sampler's micro-batches in its order, without end. The tensors are the same for every num_workers (0: read in this process).

    part: the tokens that are kept of each sample. Everything is made for whole samples before.
    check: called with every micro-batch, of whole samples; it raises if one is wrong. wait_seconds: time the caller has spent in `next` so
    far, without that check. If the workers keep up, it is only the time to receive a micro-batch. starts_workers: whether the first `next`,
    which starts workers, is still to come.
    """

    def __init__(
        self,
        dataset: SampleSource,
        sampler: Iterable[MicroBatchIndices],
        num_workers: int,
        rules: DocumentRules,
        check: Callable[[MicroBatch], None] | None = None,
        part: TokenPart = WHOLE,
    ) -> None:
        self.wait_seconds = 0.0
        self.starts_workers = num_workers > 0
        self._part = part
        self._check = check
        self._batches = _in_order(_MicroBatchDataset(dataset, rules), sampler, num_workers)

    def __next__(self) -> MicroBatch:
        started = time.perf_counter()
        self.starts_workers = False
        batch = next(self._batches)
        self.wait_seconds += time.perf_counter() - started
        if self._check is not None:
            self._check(batch)
        return batch.keeping(self._part)


def _in_order(batches: _MicroBatchDataset, sampler: Iterable[MicroBatchIndices], num_workers: int) -> Iterator[MicroBatch]:
    if num_workers == 0:
        yield from (batches[indices] for indices in sampler)
        return
    # Workers start when the first micro-batch is requested. Without its own generator, DataLoader would draw from torch's global one.
    loader = DataLoader(
        batches,
        sampler=sampler,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=MICRO_BATCHES_AHEAD,
        collate_fn=_in_shared_memory,
        # A forked worker shares the indices with this process; another worker would get a full copy of them.
        multiprocessing_context="fork" if "fork" in get_all_start_methods() else None,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),
    )
    # Workers inherit the mask, so no thread of theirs takes SIGTERM, however early a library starts it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        started = iter(loader)
    except OSError as error:
        raise RuntimeError(
            f"the processes that read data (--num-workers {num_workers}) cannot start ({error}); {LIMITS_OF_WORKERS}"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield from started
    except (ConnectionError, EOFError) as error:
        if RAISED_IN_A_WORKER in str(error):
            raise
        raise RuntimeError(  # the socket to a worker that is no longer there
            "a process that reads data (--num-workers) was killed, perhaps because memory ran out: the kernel's log (dmesg) may say so"
        ) from error


def _ignore_signals(worker: int) -> None:
    """Ignores the signals that launchers send to whole process groups. The rank ends its workers; they also end if it dies.

    SIGTERM is blocked already.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_when_told_by, args=(os.getppid(),), daemon=True).start()


def _end_when_told_by(rank: int) -> None:
    """Ends this process when SIGTERM comes from the rank itself: an interpreter that exits sends it, and waits for its workers."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)


def _in_shared_memory(batch: Any) -> MicroBatch:  # torch's type is that of samples in a list
    """The micro-batch with its tensors where the rank can read them.

    DataLoader would move them in a thread of its own. An error there leaves the rank waiting forever.
    """
    try:
        for tensor in filter(torch.is_tensor, vars(batch).values()):
            tensor.share_memory_()
    except RuntimeError as error:
        raise RuntimeError(f"a worker (--num-workers) cannot move a micro-batch to shared memory ({error}); {LIMITS_OF_WORKERS}") from error
    return batch


class _MicroBatchDataset(Dataset[MicroBatch]):
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
