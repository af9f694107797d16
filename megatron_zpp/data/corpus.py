"""One corpus of a run: its documents by split, and the cached indices of its samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_zpp.data.build_once import ProgressPrinter
from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.gpt_indices import GPTIndices, indices_of, needed_bytes
from megatron_zpp.data.index_cache import CachedIndices, IndexCache
from megatron_zpp.data.index_room import check_room
from megatron_zpp.data.reading import CorpusOrder
from megatron_zpp.data.split_corpora import SPLIT_WORDS, SplitCorpus


@dataclass(frozen=True)
class SampleOrder:
    """What decides the order of samples apart from the documents. cache_folder: None for a folder beside each corpus."""

    seq_length: int
    seed: int
    cache_folder: Path | None

    def folder_of(self, prefix: str) -> Path:
        """The folder that keeps the indices of a corpus."""
        return folder_of(self.cache_folder, prefix)


def folder_of(cache_folder: Path | None, prefix: str) -> Path:
    """The folder for files derived from a corpus: the cache folder if given, else a folder beside the corpus."""
    return cache_folder or Path(f"{prefix}.cache")


class Corpus(SplitCorpus):
    """A corpus of a run, of which datasets are made."""

    def __init__(self, prefix: str, split: str | None, order: SampleOrder) -> None:
        super().__init__(prefix, split, order.seq_length)
        self.order = order

    def dataset(self, split_name: str, sample_count: int, progress: ProgressPrinter, messages: list[str], share: float = 1.0) -> GPTDataset:
        """At least sample_count samples of a split that has tokens; 0 means one pass over the split. share: of the corpus in its blend.

        Appends to `messages` what a user should know.
        """
        order = self._order_of(split_name, sample_count, share)
        cached = self._cached_indices(order, split_name, progress)
        if cached.message is not None:
            messages.append(cached.message)
        return GPTDataset(self.source, cached.indices, order)

    def _order_of(self, split_name: str, sample_count: int, share: float) -> CorpusOrder:
        documents = self.documents[split_name]
        return CorpusOrder(
            Path(self.prefix).name.encode(errors="backslashreplace").decode(),  # a file name may have bytes that are not UTF-8
            self._lengths_digest,
            self._beginnings_digest,
            len(self.source),
            documents.start,
            documents.stop,
            self.token_count(split_name),
            sample_count,
            self.order.seq_length,
            self.order.seed,
            share,
        )

    def _cached_indices(self, order: CorpusOrder, split_name: str, progress: ProgressPrinter) -> CachedIndices[GPTIndices]:
        what = f"the {SPLIT_WORDS[split_name]} indices of {self.prefix}"

        def build() -> GPTIndices:
            check_room(needed_bytes(order.epochs, len(order.documents)), order.epochs.sample_count, what, split_name)
            return indices_of(order, self.source.lengths[:])

        description = {
            "class": "GPTDataset",
            "corpus": Path(self.prefix).name,
            # Of the data, the indices depend on the document lengths only.
            "document_lengths_sha256": order.lengths_sha256,
            "documents": [order.first_document, order.stop_document],
            "index_split": split_name,
            "num_samples": order.sample_count,
            "random_seed": order.seed,
            "sequence_length": order.seq_length,
        }
        cache = IndexCache(GPTIndices, self.order.folder_of(self.prefix), split_name, description)
        return cache.load_or_build(build, what, progress)

    @cached_property
    def _lengths_digest(self) -> str:
        return self.source.lengths_digests([len(self.source)])[len(self.source)]

    @cached_property
    def _beginnings_digest(self) -> str:
        return self.source.beginnings_digest(len(self.source))
