"""Which tokens a run reads again, and which documents change their split, after its data or their order have changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_zpp.data.blended_dataset import BlendedDataset
from megatron_zpp.data.epochs import plan_epochs
from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.gpt_indices import build_gpt_indices, needed_bytes
from megatron_zpp.data.index_builders import deal_samples
from megatron_zpp.data.index_room import check_room
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.reading import CorpusOrder, Reading

COUNTED_SAMPLES = 4096  # at most; of more samples these are evenly apart, and give the share of tokens to about 2 %


class ReadTokens:
    """The tokens in samples [first, stop) of an order, in a corpus that begins with the documents of the order."""

    def __init__(self, source: IndexedDataset, order: CorpusOrder, first: int, stop: int) -> None:
        lengths = source.lengths[: order.document_count]
        indices = build_gpt_indices(lengths, order.documents, sample_count=order.sample_count, seq_length=order.seq_length, seed=order.seed)
        document, shuffle = np.asarray(indices.document), np.asarray(indices.shuffle)
        self._is_read = np.zeros(len(shuffle), dtype=bool)  # [samples]
        self._is_read[shuffle[first:stop]] = True
        self._documents, self._seq_length = order.documents, order.seq_length
        ends = np.cumsum(lengths[document], dtype=np.int64)
        # [documents, epochs]: where each document begins in the stream of the order
        self._begins = (ends - lengths[document])[np.argsort(document, kind="stable")].reshape(len(order.documents), -1)

    def contain(self, documents: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Whether each token is one of these: token offsets[i] of document documents[i]. Returns [tokens] bool."""
        found = (documents >= self._documents.start) & (documents < self._documents.stop)
        begins = self._begins[documents[found] - self._documents.start]
        samples = (begins + offsets[found, None]) // self._seq_length
        is_whole = samples < len(self._is_read)  # the stream goes on after its last sample
        found[found] = (is_whole & self._is_read[np.where(is_whole, samples, 0)]).any(axis=1)
        return found


class Again(NamedTuple):
    """How many of the counted tokens were read before. uncounted: tokens that may come again and are not counted, and why, in words."""

    tokens: int
    counted_tokens: int
    uncounted: tuple[str, ...]


class EarlierDocuments:
    """Finds the documents of earlier readings in the corpora of a run, also under other names and with further documents after them.

    Documents are the same if they have the same lengths, and a few of them the same first tokens.
    """

    def __init__(self, sources: Sequence[IndexedDataset], readings: Sequence[Reading]) -> None:
        self._sources = sources
        counts = {order.document_count for reading in readings for orders in reading.splits.values() for order in orders}
        # The digests of a corpus by its prefix, and then by the number of its first documents.
        self._digests = {
            source.prefix: source.lengths_digests(count for count in (*counts, len(source)) if count <= len(source)) for source in sources
        }

    def sources_of(self, order: CorpusOrder) -> list[IndexedDataset]:
        """The corpora that begin with the documents of the order."""
        count = order.document_count
        return [
            source
            for source in self._sources
            if self._digests[source.prefix].get(count) == order.lengths_sha256
            and source.beginnings_digest(count) == order.beginnings_sha256
        ]

    def read_again(self, readings: Sequence[Reading], train: GPTDataset | BlendedDataset, first: int, stop: int) -> Again:
        """How many tokens in samples [first, stop) of `train` were in the first `first` samples of the run, which `readings` describe."""
        read, uncounted = defaultdict[str, list[ReadTokens]](list), dict[str, None]()
        ends = [*(reading.first_sample for reading in readings[1:]), first]
        for reading, end in zip(readings, ends, strict=True):
            if not reading.tokenizer:
                uncounted[f"those before sample {end}, about which the checkpoint does not say what they are"] = None
            orders = reading.splits.get("train", ())
            for order, begin, finish in zip(orders, drawn(orders, reading.first_sample), drawn(orders, end), strict=True):
                if begin == finish:
                    continue
                why_not = self._why_uncounted(order)
                if why_not is not None:
                    uncounted[f"those of {order.corpus}, {why_not}"] = None
                    continue
                for source in self.sources_of(order):
                    read[source.prefix].append(ReadTokens(source, order, begin, finish))
        again = counted = 0
        for number in np.unique(np.linspace(first, stop - 1, min(stop - first, COUNTED_SAMPLES), dtype=np.int64)).tolist():
            source, documents, offsets = train.places_of(number)
            were_read = np.zeros(len(documents), dtype=bool)
            for tokens in read[source.prefix]:
                were_read |= tokens.contain(documents, offsets)
            again, counted = again + int(were_read.sum()), counted + len(documents)
        return Again(again, counted, tuple(uncounted))

    def moved(self, then: Reading, here: Reading, *, from_split: str, to_split: str) -> int:
        """How many documents of from_split in `then` are of to_split in `here`, without those that were of both before."""
        count = 0
        for order in then.splits.get(from_split, ()):
            before, now = (
                [other for other in reading.splits.get(to_split, ()) if self._begin_alike(order, other)] for reading in (then, here)
            )
            ends = {place for other in (order, *before, *now) for place in (other.first_document, other.stop_document)}
            for first, stop in pairwise(sorted(ends)):  # all of these documents are in the same orders
                is_moved = any(first in other.documents for other in now) and not any(first in other.documents for other in before)
                count += (stop - first) * (first in order.documents and is_moved)
        return count

    def _why_uncounted(self, order: CorpusOrder) -> str | None:
        if not self.sources_of(order):
            is_replaced = any(Path(source.prefix).name == order.corpus for source in self._sources)
            return "whose earlier documents are not there" if is_replaced else None
        epochs = plan_epochs(order.token_count, sample_count=order.sample_count, seq_length=order.seq_length)
        try:
            check_room(3 * needed_bytes(epochs, len(order.documents)), epochs.sample_count, order.corpus, "train")
        except ValueError:
            return "whose earlier order takes more memory than this machine has left"
        return None

    def _begin_alike(self, order: CorpusOrder, other: CorpusOrder) -> bool:
        """Whether a corpus begins with the documents of both, so that a number means the same document in both."""
        return any(source in self.sources_of(other) for source in self.sources_of(order))


def drawn(orders: Sequence[CorpusOrder], samples: int) -> list[int]:
    """How many of the first `samples` samples of a blend come from each corpus."""
    if len(orders) < 2:
        return [samples] * len(orders)
    dataset, _ = deal_samples(np.array([order.share for order in orders], dtype=np.float64), samples)
    counts: list[int] = np.bincount(dataset, minlength=len(orders)).tolist()
    return counts
