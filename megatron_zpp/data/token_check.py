"""The check of a corpus against a vocabulary, read once per corpus and remembered beside its index cache."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from megatron_zpp.data.build_once import SILENCE, Speaker, appearing_whole, built_once
from megatron_zpp.data.indexed_dataset import IndexedDataset, check_token_ids


def check_token_ids_once(dataset: IndexedDataset, vocab_size: int, folder: Path, speaker: Speaker = SILENCE) -> None:
    """Nothing, if every stored id lies in [0, vocab_size).

    folder: keeps the verdict, which holds for this .bin (by size and time of change) and for vocabularies of this size or larger; without
    a verdict one process reads the whole .bin while others that share the folder wait. Raises ValueError naming file, id and document.
    """
    place = hashlib.md5(os.path.abspath(dataset.prefix).encode(), usedforsecurity=False).hexdigest()[:8]
    record = folder / f"{Path(dataset.prefix).name}-{place}-token-check.json"
    status = os.stat(dataset.token_path)
    corpus = {"bytes": status.st_size, "changed_ns": status.st_mtime_ns}

    def load() -> bool | None:
        return True if _remembered_vocab_size(record, corpus) <= vocab_size else None

    def check() -> bool:
        check_token_ids(dataset, vocab_size)
        _remember(record, {**corpus, "vocab_size": vocab_size})
        return True

    what = f"the verdict on the ids of {dataset.token_path} ({status.st_size / 1e9:.1f} GB)"
    try:
        built_once(record.with_suffix(""), what, load, check, speaker)
    except OSError:
        # Nothing can be kept in the folder: the next run reads the corpus again.
        check_token_ids(dataset, vocab_size)


def _remembered_vocab_size(record: Path, corpus: dict[str, int]) -> float:
    """The smallest vocabulary known to hold all ids of this corpus; infinity where nothing is known."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        is_same = all(found[key] == value for key, value in corpus.items())
        return int(found["vocab_size"]) if is_same else float("inf")
    except (OSError, ValueError, KeyError, TypeError):
        return float("inf")


def _remember(record: Path, verdict: dict[str, int]) -> None:
    with appearing_whole(record) as file:
        file.write(json.dumps(verdict).encode())
