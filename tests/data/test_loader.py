import contextlib
import errno
import itertools
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch.utils.data import _utils

from megatron_zpp.data import loader
from megatron_zpp.data.documents import DocumentRules
from megatron_zpp.data.gpt_dataset import MockDataset
from megatron_zpp.data.loader import WHOLE, MicroBatch, MicroBatches, TokenPart
from megatron_zpp.data.sampler import MicroBatchSampler

_utils.MP_STATUS_CHECK_INTERVAL = 0.1  # seconds for which a loader waits for the end of a worker that has raised

NO_RULES = DocumentRules(eod=0, resets_positions=False, resets_attention=False, masks_loss=False)


def first_batches(num_workers: int, count: int, rules: DocumentRules = NO_RULES, part: TokenPart = WHOLE) -> list[MicroBatch]:
    dataset = MockDataset(seed=1, stream=0, seq_length=6, vocab_size=50, sample_count=100)
    return list(islice(MicroBatches(dataset, MicroBatchSampler(100, 8, 2, 1, 2), num_workers, rules, part=part), count))


def test_a_micro_batch_stacks_the_samplers_samples() -> None:
    dataset = MockDataset(seed=1, stream=0, seq_length=6, vocab_size=50, sample_count=100)
    batch = first_batches(0, 2)[1]
    assert batch.first_sample == 14
    for row, index in enumerate((14, 15)):
        assert batch.tokens[row].tolist() == dataset[index]["tokens"].tolist()
        assert batch.labels[row].tolist() == dataset[index]["labels"].tolist()
    assert (batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype) == (torch.int64, torch.int64, torch.float32)
    assert batch.loss_mask.tolist() == [[1.0] * 6] * 2


def test_documents_travel_with_the_tokens_they_are_found_in() -> None:
    rules = DocumentRules(eod=11, resets_positions=True, resets_attention=True, masks_loss=True)
    batches = first_batches(0, 4, rules)
    assert any((batch.tokens == 11).any() for batch in batches)
    for batch in batches:
        positions, lengths = rules.position_ids(batch.tokens.numpy()), rules.document_lengths(batch.tokens.numpy())
        assert batch.position_ids is not None and batch.document_lengths is not None
        assert positions is not None and batch.position_ids.tolist() == positions.tolist()
        assert lengths is not None and batch.document_lengths.tolist() == lengths.tolist()
        assert torch.equal(batch.loss_mask == 0, batch.tokens == 11)


@pytest.mark.parametrize("num_workers, ranks", [(0, 3), (1, 2)])
def test_ranks_that_share_samples_keep_their_tokens_of_what_was_made_for_whole_samples(num_workers: int, ranks: int) -> None:
    rules = DocumentRules(eod=11, resets_positions=True, resets_attention=True, masks_loss=True)
    of_ranks = [first_batches(num_workers, 4, rules, TokenPart(rank, ranks)) for rank in range(ranks)]
    for whole, *parts in zip(first_batches(0, 4, rules), *of_ranks, strict=True):
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(whole, name))
            assert all(getattr(part, name).is_contiguous() and getattr(part, name).shape[1] == 6 // ranks for part in parts)
        assert [part.part for part in parts] == [TokenPart(rank, ranks) for rank in range(ranks)]
        for part in parts:
            assert part.first_sample == whole.first_sample and part.mean_counted == float(whole.loss_mask.sum()) / ranks
            assert torch.equal(part.position_ids, whole.position_ids) and torch.equal(part.document_lengths, whole.document_lengths)


def test_every_micro_batch_is_checked_whole() -> None:
    dataset = MockDataset(seed=1, stream=0, seq_length=6, vocab_size=50, sample_count=100)
    checked: list[MicroBatch] = []
    batches = MicroBatches(dataset, MicroBatchSampler(100, 8, 2, 1, 2), 0, NO_RULES, checked.append, TokenPart(1, 2))
    kept = [next(batches), next(batches)]
    assert [batch.tokens.shape for batch in (*checked, *kept)] == [(2, 6), (2, 6), (2, 3), (2, 3)]


def test_a_micro_batch_of_which_no_token_counts_is_divided_by_one_token_of_all_ranks() -> None:
    (batch,) = first_batches(0, 1)
    assert replace(batch, loss_mask=torch.zeros(2, 6)).keeping(TokenPart(2, 3)).mean_counted == 1 / 3
    assert batch.keeping(WHOLE) is batch and batch.mean_counted is None


def test_samples_that_ranks_cannot_share_are_refused() -> None:
    (batch,) = first_batches(0, 1)
    with pytest.raises(RuntimeError, match="4 ranks cannot divide samples of 6 tokens"):
        batch.keeping(TokenPart(0, 4))


def test_waiting_is_counted() -> None:
    dataset = MockDataset(seed=1, stream=0, seq_length=6, vocab_size=50, sample_count=100)
    batches = MicroBatches(dataset, MicroBatchSampler(100, 0, 2, 0, 1), 0, NO_RULES)
    next(batches)
    first = batches.wait_seconds
    next(batches)
    assert 0 < first < batches.wait_seconds


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(num_workers: int) -> None:
    rules = DocumentRules(eod=11, resets_positions=True, resets_attention=True, masks_loss=True)
    for alone, worked in zip(first_batches(0, 8, rules), first_batches(num_workers, 8, rules), strict=True):
        assert alone.position_ids is not None and worked.position_ids is not None
        assert alone.document_lengths is not None and worked.document_lengths is not None
        assert torch.equal(alone.position_ids, worked.position_ids) and torch.equal(alone.document_lengths, worked.document_lengths)
        assert alone.first_sample == worked.first_sample
        assert torch.equal(alone.tokens, worked.tokens)
        assert torch.equal(alone.labels, worked.labels)
        assert torch.equal(alone.loss_mask, worked.loss_mask)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_does_not_touch_torchs_random_state(num_workers: int) -> None:
    before = torch.random.get_rng_state()
    first_batches(num_workers, 2)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("has_thread", [False, True], ids=["", "a library starts a thread after each fork"])
def test_workers_outlive_the_signals_that_launchers_send_to_whole_process_groups(has_thread: bool) -> None:
    dataset = MockDataset(seed=1, stream=0, seq_length=6, vocab_size=50, sample_count=100)
    batches = MicroBatches(dataset, MicroBatchSampler(100, 8, 2, 1, 2), 2, NO_RULES)
    before = set(multiprocessing.active_children())
    with threads_in_forked_processes() if has_thread else contextlib.nullcontext():
        for _ in range(2):
            next(batches)  # one of each worker: both have started
    workers = set(multiprocessing.active_children()) - before
    for worker, number in itertools.product(workers, (signal.SIGTERM, signal.SIGUSR1)):
        subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)  # from another process, as a launcher does
    assert len(workers) == 2
    assert [next(batches).first_sample for _ in range(5)] == [batch.first_sample for batch in first_batches(0, 7)[2:]]


@contextlib.contextmanager
def threads_in_forked_processes() -> Iterator[None]:
    """Processes that are forked within it have a second thread from the first moment on."""
    is_wanted = [True]

    def start_thread() -> None:
        if is_wanted:
            threading.Thread(target=threading.Event().wait, daemon=True).start()

    os.register_at_fork(after_in_child=start_thread)
    yield
    is_wanted.clear()


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_takes_sigterm_again_once_its_workers_have_started_or_failed_to(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,) = first_batches(0, 1)
    masks = []

    class Workers:
        """Notes which signals are blocked while it starts."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def __iter__(self) -> Iterator[MicroBatch]:
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            if fails:
                raise OSError("too many processes")
            return iter([batch])

    monkeypatch.setattr(loader, "DataLoader", Workers)
    with (
        pytest.raises(RuntimeError, match=r"--num-workers 1\) cannot start \(too many processes\); enlarge /dev/shm")
        if fails
        else contextlib.nullcontext()
    ):
        first_batches(1, 1)
    assert [signal.SIGTERM in mask for mask in masks] == [True]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_that_dies_while_a_micro_batch_is_taken_from_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> Iterator[object]:
        yield from ()
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(loader, "DataLoader", lambda *arguments, **options: taken())
    with pytest.raises(RuntimeError, match=r"a process that reads data \(--num-workers\) was killed"):
        first_batches(1, 1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_reading_is_not_taken_for_a_killed_worker(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    def read(*_: object) -> object:
        raise EOFError("no more samples")

    monkeypatch.setattr(MockDataset, "__getitem__", read)
    with pytest.raises(EOFError, match="no more samples"):
        first_batches(num_workers, 1)


def test_a_micro_batch_without_room_in_shared_memory_ends_the_run_instead_of_leaving_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
    with pytest.raises(RuntimeError, match=r"cannot move a micro-batch to shared memory \(No space left on device \(28\)\); enlarge"):
        first_batches(1, 1)


def test_a_worker_ends_when_its_rank_tells_it_to_so_that_an_interpreter_can_exit() -> None:
    before = set(multiprocessing.active_children())
    dataset = MockDataset(seed=1, stream=0, seq_length=6, vocab_size=50, sample_count=100)
    batches = MicroBatches(dataset, MicroBatchSampler(100, 8, 2, 1, 2), 1, NO_RULES)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0
