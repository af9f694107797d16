"""Small corpora on disk, and the golden vectors."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.gpt_indices import indices_of
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.preprocess.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.reading import CorpusOrder

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_vectors.json").read_text())


def write_corpus(folder: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16", name: str = "corpus") -> str:
    """The prefix of a corpus of these documents."""
    prefix = str(folder / name)
    with IndexedDatasetWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=np.int64))
        writer.finalize()
    return prefix


def counting_documents(lengths: Sequence[int]) -> list[list[int]]:
    """Documents of these lengths that hold 0, 1, 2, ... one after the other."""
    ends = np.cumsum(lengths).tolist()
    return [list(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]


def open_dataset(prefix: str, documents: range, *, sample_count: int, seq_length: int = 8, seed: int = 1234) -> GPTDataset:
    """The samples of some documents of a corpus, without a cache."""
    source = IndexedDataset(prefix)
    count, lengths = len(source), source.lengths[:]
    order = CorpusOrder(
        Path(prefix).name,
        source.lengths_digests([count])[count],
        source.beginnings_digest(count),
        count,
        documents.start,
        documents.stop,
        int(lengths[documents.start : documents.stop].sum()),
        sample_count,
        seq_length,
        seed,
    )
    return GPTDataset(source, indices_of(order, lengths), order)


def write_golden_corpus(folder: Path) -> str:
    return write_corpus(folder, counting_documents(GOLDEN["dataset"]["doc_lengths"]))
