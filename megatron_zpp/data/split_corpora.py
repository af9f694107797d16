"""The corpora of a run and the documents of each split, as --split or a blend for each split says (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from megatron_zpp.config.counted import counted
from megatron_zpp.config.data_sources import SPLITS, DataSources
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.split import split_documents
from megatron_zpp.system.user_error import UserError

SPLIT_WORDS = {"train": "training", "valid": "validation", "test": "test"}


class SplitCorpus:
    """The documents of one corpus, divided into splits.

    split: shares of the documents as in --split, or None if every split uses all documents.
    Raises UserError for unusable files or an unusable split.
    """

    def __init__(self, prefix: str, split: str | None, seq_length: int) -> None:
        self.source = IndexedDataset(prefix)
        self._seq_length = seq_length
        self._split = split
        everything = dict.fromkeys(SPLITS, range(len(self.source)))
        self.documents: Mapping[str, range] = everything if split is None else split_documents(split, len(self.source))

    @property
    def prefix(self) -> str:
        return self.source.prefix

    def token_count(self, split_name: str) -> int:
        """Tokens in the documents of a split."""
        documents = self.documents[split_name]
        return self.source.tokens_before(documents.stop) - self.source.tokens_before(documents.start)

    def samples_per_epoch(self, split_name: str) -> int:
        """Samples that one pass over the documents of a split yields."""
        return max(0, self.token_count(split_name) - 1) // self._seq_length

    def why_empty(self, split_name: str) -> str:
        """One sentence that says why a split has no tokens."""
        found = f"The {SPLIT_WORDS[split_name]} split of {self.prefix} is empty"
        if self._split is None or self.documents[split_name]:
            return f"{found}: its {counted(len(self.documents[split_name]), 'document holds', 'documents hold')} no token."
        counts = ", ".join(str(len(documents)) for documents in self.documents.values())
        return f"{found}: --split {self._split} cuts its {counted(len(self.source), 'document')} into {counts}."


AnyCorpus = TypeVar("AnyCorpus", bound=SplitCorpus)


class SplitCorpora(Generic[AnyCorpus]):
    """All corpora of a run by prefix, each opened once, and the blends of the splits.

    open_corpus: makes a corpus from its prefix and the shares of its splits.
    """

    def __init__(self, sources: DataSources, split: str, open_corpus: Callable[[str, str | None], AnyCorpus]) -> None:
        self.blends = {name: blend for name in SPLITS if (blend := sources.common or sources.by_split.get(name)) is not None}
        cut = split if sources.common is not None else None
        prefixes = dict.fromkeys(prefix for blend in self.blends.values() for prefix in blend.prefixes)
        self.by_prefix = {prefix: open_corpus(prefix, cut) for prefix in prefixes}

    def used_for_training(self) -> tuple[list[tuple[AnyCorpus, float]], list[str]]:
        """As `used`, for training. Raises UserError if there is nothing to train on."""
        used, left_out = self.used("train")
        if not used:
            raise UserError(f"{left_out[0]} Give training a larger share or more documents.")
        return used, left_out

    def used(self, split_name: str) -> tuple[list[tuple[AnyCorpus, float]], list[str]]:
        """The corpora with samples in this split, each with its weight, and messages about the others. One alone needs a token only.

        Raises UserError for a corpus with a weight that has nothing to train on.
        """
        blend = self.blends[split_name]
        if blend.is_plain:
            corpus = self.by_prefix[blend.prefixes[0]]
            return ([(corpus, 1)], []) if corpus.token_count(split_name) else ([], [corpus.why_empty(split_name)])
        weights = blend.weights or [self.by_prefix[prefix].samples_per_epoch(split_name) for prefix in blend.prefixes]
        used, left_out = list[tuple[AnyCorpus, float]](), list[str]()
        for prefix, weight in zip(blend.prefixes, weights, strict=True):
            corpus = self.by_prefix[prefix]
            if corpus.token_count(split_name) == 0:
                why_empty = corpus.why_empty(split_name)
                if split_name == "train" and blend.weights is not None:
                    raise UserError(f"{why_empty} Give it documents to train on, or leave it out of the blend.")
                left_out.append(f"{why_empty} The blend leaves it out.")
            elif weight == 0:
                left_out.append(f"The {SPLIT_WORDS[split_name]} split of {prefix} is shorter than one sample: the blend leaves it out.")
            else:
                used.append((corpus, weight))
        return used, left_out
