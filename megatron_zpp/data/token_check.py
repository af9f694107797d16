"""Checks once per corpus that all token ids are in the vocabulary, and records the result beside the index cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from megatron_zpp.data.build_once import SILENT, ProgressPrinter, atomic_write, built_once
from megatron_zpp.data.indexed_dataset import IndexedDataset, check_token_ids
from megatron_zpp.system.outside import OutsideFile, open_regular

SAMPLE_BLOCKS, SAMPLE_BLOCK_BYTES = 16, 4096


def check_token_ids_once(dataset: IndexedDataset, vocab_size: int, folder: Path, progress: ProgressPrinter = SILENT) -> None:
    """Raises UserError, naming file, id and document, if a stored id is outside [0, vocab_size).

    folder: keeps a record of the check. It is valid for this .bin (same size, modification time and sampled bytes) and for vocabularies of
    this size or larger. Without a valid record one process reads the whole .bin while other processes that share the folder wait.
    """
    place = hashlib.md5(os.fsencode(os.path.abspath(dataset.prefix)), usedforsecurity=False).hexdigest()[:8]
    record = folder / f"{Path(dataset.prefix).name}-{place}-token-check.json"
    status = os.stat(dataset.token_path)
    corpus = {"bytes": status.st_size, "changed_ns": status.st_mtime_ns, "sample": _sample_digest(dataset.token_path, status.st_size)}

    def load() -> bool | None:
        return True if _recorded_vocab_size(record, corpus) <= vocab_size else None

    def check() -> bool:
        check_token_ids(dataset, vocab_size)
        with atomic_write(record) as file:
            file.write(json.dumps({**corpus, "vocab_size": vocab_size}).encode())
        return True

    what = f"the verdict on the ids of {dataset.token_path} ({status.st_size / 1e9:.1f} GB)"
    try:
        built_once(record.with_suffix(""), what, load, check, progress)
    except OSError:
        # The folder is not writable: the next run reads the corpus again.
        check_token_ids(dataset, vocab_size)


def _sample_digest(path: str, nbytes: int) -> str:
    """A digest of blocks spread evenly over the file, with its beginning and its end; of all of it if it is small.

    Size and time do not tell a corpus from another that was put in its place with the same time, but other text differs in almost every
    block. Inode and time of change would cost no reads. But each node with a copy of its own has others, so nodes that share a cache folder
    would read their whole corpora at every start, and so would a run after a `chmod` or a restored backup.
    """
    digest = hashlib.blake2b(digest_size=16)
    last = max(nbytes - SAMPLE_BLOCK_BYTES, 0)
    with open(open_regular(path), "rb", buffering=0) as file:
        for block in range(SAMPLE_BLOCKS):
            digest.update(os.pread(file.fileno(), SAMPLE_BLOCK_BYTES, last * block // (SAMPLE_BLOCKS - 1)))
    return digest.hexdigest()


def _recorded_vocab_size(record: Path, corpus: Mapping[str, object]) -> float:
    """The size of the smallest vocabulary known to contain all ids of this corpus; infinity if there is no valid record."""
    try:
        found = OutsideFile(record, str(record)).members()
        is_same = all(found.any(key) == value for key, value in corpus.items())
        return found.count("vocab_size") if is_same else float("inf")
    except ValueError:
        return float("inf")
