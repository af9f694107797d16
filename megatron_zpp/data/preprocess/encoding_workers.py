"""Encodes batches of lines in several processes and keeps their order."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor

from megatron_zpp.data.preprocess.document_encoder import DocumentEncoder, EncodedBatch
from megatron_zpp.data.preprocess.held_signals import held_interruptions
from megatron_zpp.data.preprocess.json_lines import LineBatch

# Batches submitted per worker: enough to keep it busy, few enough to bound memory when the disk is the slowest part.
BATCHES_PER_WORKER = 4

# A worker process gets its encoder once: to send the tokenizer with every batch would cost more than to send the text.
_worker_encoder: list[DocumentEncoder] = []


def encoded_batches(
    encoder: DocumentEncoder, batches: Iterator[LineBatch], workers: int
) -> Generator[tuple[LineBatch, EncodedBatch], None, None]:
    """Each batch without its text, and its encoding, in the order of the batches. One worker means this process.

    Raises BrokenProcessPool if a worker is killed from outside.
    """
    if workers == 1:
        for batch in batches:
            yield batch._replace(text=b""), encoder.encode(batch.text)
        return
    pool = ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(encoder,))
    under_way: deque[tuple[LineBatch, Future[EncodedBatch]]] = deque()
    try:
        for batch in batches:
            with held_interruptions():
                under_way.append((batch._replace(text=b""), pool.submit(_encode_in_worker, batch.text)))
            if len(under_way) == workers * BATCHES_PER_WORKER:
                yield _first_result(under_way)
        while under_way:
            yield _first_result(under_way)
    finally:
        pool.shutdown(cancel_futures=True)


def _first_result(under_way: deque[tuple[LineBatch, Future[EncodedBatch]]]) -> tuple[LineBatch, EncodedBatch]:
    batch, future = under_way.popleft()
    with held_interruptions():
        return batch, future.result()


def _start_worker(encoder: DocumentEncoder) -> None:
    follow_parent()
    _worker_encoder.append(encoder)


def follow_parent() -> None:
    """Makes this worker process leave Ctrl-C to the first process, and end when that ends."""
    # Ctrl-C reaches every process of a terminal, but only the first process may react to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when the first process ends, even if that is killed and cannot tell its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            parent.join()
        os._exit(1)


def _encode_in_worker(text: bytes) -> EncodedBatch:
    return _worker_encoder[0].encode(text)
