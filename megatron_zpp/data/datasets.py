"""The training, validation and test data of a run, from --data-path and --split or from --mock-data."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.gpt_indices import GPTIndices, build_gpt_indices
from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.mock_dataset import MockDataset
from megatron_zpp.data.sample import SampleSource
from megatron_zpp.data.split import SPLIT_NAMES, split_documents

SPLIT_WORDS = {"train": "training", "valid": "validation", "test": "test"}


class SampleCounts(NamedTuple):
    train: int
    valid: int
    test: int


class Datasets(NamedTuple):
    train: SampleSource
    valid: SampleSource | None
    test: SampleSource | None
    source: IndexedDataset | None  # what all three are cut from; none for mock data
    messages: tuple[str, ...]  # for one rank to print


def count_samples(*, train_samples: int, global_batch_size: int, eval_interval: int, eval_iters: int) -> SampleCounts:
    """How many samples a run draws of each split: one evaluation per eval_interval and one at the end, one test."""
    train_iters = train_samples // global_batch_size
    evaluations = train_iters // eval_interval + 1
    return SampleCounts(train_samples, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size)


def build_datasets(data: DataConfig, *, seq_length: int, seed: int, sample_counts: SampleCounts, vocab_size: int) -> Datasets:
    """The datasets of a run, each long enough for sample_counts; without documents, validation and test are None, and a message says so.

    Every rank calls this; ranks of a node share the index cache. vocab_size matters for mock data only.
    Raises ValueError for unusable files, an unusable --split, or a training split without tokens.
    """
    if data.mock_data and data.data_path:
        raise ValueError("--mock-data and --data-path exclude each other; leave one of them out.")
    if data.mock_data:
        return _mock_datasets(seq_length=seq_length, seed=seed, sample_counts=sample_counts, vocab_size=vocab_size)
    if not data.data_path:
        raise ValueError("Neither --data-path nor --mock-data is given; give one of them.")
    if len(data.data_path) > 1:
        raise ValueError(f"--data-path has {len(data.data_path)} values, but blends are not supported yet; give one prefix.")
    corpus = _Corpus(data, IndexedDataset(data.data_path[0]), seq_length=seq_length, seed=seed)
    return corpus.datasets(sample_counts)


def cache_folder(data: DataConfig, source: IndexedDataset) -> Path:
    """Where what is derived from a corpus is kept: --data-cache-path, else a folder beside the corpus."""
    return Path(data.data_cache_path or f"{source.prefix}.cache")


def _mock_datasets(*, seq_length: int, seed: int, sample_counts: SampleCounts, vocab_size: int) -> Datasets:
    train, valid, test = (
        MockDataset(seed=seed, stream=stream, seq_length=seq_length, vocab_size=vocab_size, sample_count=count)
        for stream, count in enumerate(sample_counts)
    )
    return Datasets(train, valid, test, None, ())


class _Corpus:
    def __init__(self, data: DataConfig, source: IndexedDataset, *, seq_length: int, seed: int) -> None:
        self.source = source
        self.split = data.split
        self.cache_folder = cache_folder(data, source)
        self.seq_length = seq_length
        self.seed = seed
        self.lengths_digest = hashlib.sha256(source.lengths.data).hexdigest()
        self.documents = split_documents(data.split, len(source))

    def datasets(self, sample_counts: SampleCounts) -> Datasets:
        found: dict[str, GPTDataset | None] = {}
        messages: list[str] = []
        for name, sample_count in zip(SPLIT_NAMES, sample_counts, strict=True):
            if self._has_tokens(name):
                found[name] = self._build(name, sample_count, messages)
            else:
                found[name] = None
                messages.append(self._empty(name))
        if found["train"] is None:
            raise ValueError(f"{messages[0]} Give training a larger share or more documents.")
        return Datasets(found["train"], found["valid"], found["test"], self.source, tuple(dict.fromkeys(messages)))

    def _has_tokens(self, name: str) -> bool:
        documents = self.documents[name]
        return bool(self.source.lengths[documents.start : documents.stop].any())

    def _empty(self, name: str) -> str:
        counts = ", ".join(str(len(documents)) for documents in self.documents.values())
        return (
            f"The {SPLIT_WORDS[name]} split of {self.source.prefix} is empty: --split {self.split} cuts its {len(self.source)} documents "
            f"into {counts}."
        )

    def _build(self, name: str, sample_count: int, messages: list[str]) -> GPTDataset:
        cached = IndexCache(self.cache_folder, name, self._description(name, sample_count)).load_or_build(
            lambda: self._build_indices(name, sample_count)
        )
        if cached.message is not None:
            messages.append(cached.message)
        return GPTDataset(self.source, cached.indices)

    def _build_indices(self, name: str, sample_count: int) -> GPTIndices:
        return build_gpt_indices(
            self.source.lengths, self.documents[name], sample_count=sample_count, seq_length=self.seq_length, seed=self.seed
        )

    def _description(self, name: str, sample_count: int) -> dict[str, object]:
        documents = self.documents[name]
        return {
            "class": "GPTDataset",
            "dataset_path": self.source.prefix,
            # The indices depend on the data through the document lengths alone.
            "document_lengths_sha256": self.lengths_digest,
            "documents": [documents.start, documents.stop],
            "index_split": name,
            "num_samples": sample_count,
            "random_seed": self.seed,
            "sequence_length": self.seq_length,
        }
