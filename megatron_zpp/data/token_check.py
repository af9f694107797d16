"""The check of a corpus against a vocabulary, read once per corpus and remembered beside its index cache."""

import contextlib
import json
import os
from pathlib import Path

from megatron_zpp.data.indexed_dataset import IndexedDataset, check_token_ids


def check_token_ids_once(dataset: IndexedDataset, vocab_size: int, folder: Path) -> None:
    """Nothing, if every stored id lies in [0, vocab_size).

    folder: keeps the verdict, which holds for this .bin (by size and time of change) and for vocabularies of this size or larger; without
    a verdict the whole .bin is read once. Raises ValueError naming file, id and document.
    """
    record = folder / f"{Path(dataset.prefix).name}-token-check.json"
    status = os.stat(dataset.token_path)
    corpus = {"bytes": status.st_size, "changed_ns": status.st_mtime_ns}
    if _remembered_vocab_size(record, corpus) <= vocab_size:
        return
    check_token_ids(dataset, vocab_size)
    _remember(record, {**corpus, "vocab_size": vocab_size})


def _remembered_vocab_size(record: Path, corpus: dict[str, int]) -> float:
    """The smallest vocabulary known to hold all ids of this corpus; infinity where nothing is known."""
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        is_same = all(found[key] == value for key, value in corpus.items())
        return int(found["vocab_size"]) if is_same else float("inf")
    except (OSError, ValueError, KeyError, TypeError):
        return float("inf")


def _remember(record: Path, verdict: dict[str, int]) -> None:
    """Keeps the verdict where the folder can be written; where it cannot, the next run reads the corpus again."""
    temporary = record.with_name(f"{record.name}.{os.getpid()}.tmp")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(verdict), encoding="utf-8")
        os.replace(temporary, record)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
