"""Checks once per corpus that all token ids are in the vocabulary, and records the result beside the index cache."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from megatron_zpp.config.outside import OutsideFile
from megatron_zpp.data.build_once import SILENT, ProgressPrinter, atomic_write, built_once
from megatron_zpp.data.indexed_dataset import IndexedDataset, check_token_ids


def check_token_ids_once(dataset: IndexedDataset, vocab_size: int, folder: Path, progress: ProgressPrinter = SILENT) -> None:
    """Raises ValueError, naming file, id and document, if a stored id is outside [0, vocab_size).

    folder: keeps a record of the check. It is valid for this .bin (same size and modification time) and for vocabularies of this size or
    larger. Without a valid record one process reads the whole .bin while other processes that share the folder wait.
    """
    place = hashlib.md5(os.path.abspath(dataset.prefix).encode(), usedforsecurity=False).hexdigest()[:8]
    record = folder / f"{Path(dataset.prefix).name}-{place}-token-check.json"
    status = os.stat(dataset.token_path)
    corpus = {"bytes": status.st_size, "changed_ns": status.st_mtime_ns}

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


def _recorded_vocab_size(record: Path, corpus: dict[str, int]) -> float:
    """The size of the smallest vocabulary known to contain all ids of this corpus; infinity if there is no valid record."""
    try:
        found = OutsideFile(record, str(record)).members()
        is_same = all(found.any(key) == value for key, value in corpus.items())
        return found.count("vocab_size") if is_same else float("inf")
    except ValueError:
        return float("inf")
