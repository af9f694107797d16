"""Finds by trial how many processes tokenise a corpus fastest."""

import time
from collections.abc import Sequence
from contextlib import closing

from megatron_zpp.config.counted import counted
from megatron_zpp.data.preprocess.document_encoder import DocumentEncoder
from megatron_zpp.data.preprocess.encoding_workers import encoded_batches
from megatron_zpp.data.preprocess.json_lines import Position, line_batches


def find_worker_count(
    encoder: DocumentEncoder, paths: Sequence[str], candidates: Sequence[int], max_documents: int, longest_line_bytes: int
) -> None:
    """Prints the rate of each number of workers on the first documents, fastest first. Writes no files."""
    rates = {workers: documents_per_second(encoder, paths, workers, max_documents, longest_line_bytes) for workers in candidates}
    for workers, rate in sorted(rates.items(), key=lambda item: -item[1]):
        print(f"{counted(workers, 'worker')}: {rate:.1f} docs/s")
    print(f"The fastest is --workers {max(rates, key=rates.__getitem__)}.")


def documents_per_second(
    encoder: DocumentEncoder, paths: Sequence[str], workers: int, max_documents: int, longest_line_bytes: int
) -> float:
    """The rate over the first max_documents documents, including the start of the processes."""
    began, count = time.monotonic(), 0
    with closing(encoded_batches(encoder, line_batches(paths, Position(), longest_line_bytes), workers)) as batches:
        for _, encoded in batches:
            count += encoded.line_count
            if count >= max_documents:
                break
    return count / max(time.monotonic() - began, 1e-9)
