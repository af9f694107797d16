"""Which tokens a run reads again, and which documents change their split, after its data or their order have changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_zpp.data.blended_dataset import BlendedDataset
from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.gpt_indices import indices_of, needed_bytes
from megatron_zpp.data.index_builders import deal_samples
from megatron_zpp.data.index_room import check_room
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.reading import CorpusOrder, Reading

COUNTED_SAMPLES = 4096  # at most; of more samples these are evenly apart, and give the share of tokens to about 2 %
PLACE_BYTES = 40  # for each document and epoch, while ReadTokens finds where they begin


class ReadTokens:
    """The tokens in samples [first, stop) of an order, in a corpus that begins with the documents of the order."""

    def __init__(self, source: IndexedDataset, order: CorpusOrder, first: int, stop: int) -> None:
        lengths = source.lengths[: order.document_count]
        document, _, shuffle = indices_of(order, lengths)
        self._is_read = np.zeros(len(shuffle), dtype=bool)  # [samples]
        self._is_read[np.asarray(shuffle[first:stop])] = True
        self._documents, self._seq_length = order.documents, order.seq_length
        document_lengths = lengths[document]
        begins = np.cumsum(document_lengths, dtype=np.int64)
        begins -= document_lengths
        # [documents, epochs]: where each document begins in the stream of the order
        self._begins = begins[np.argsort(document)].reshape(len(order.documents), -1)

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

    Documents are the same if they have the same lengths, and a few of them the same first tokens. here: what the run reads.
    """

    def __init__(self, sources: Sequence[IndexedDataset], readings: Sequence[Reading], here: Reading) -> None:
        self._readings, self._here = readings, here
        earlier, ours = (_orders_of(found) for found in (readings, [here]))
        counts = {order.digests: order.document_count for order in (*earlier, *ours)}
        digests_by_lengths = defaultdict[str, list[tuple[str, str]]](list)
        for digests in counts:
            digests_by_lengths[digests[0]].append(digests)
        # The corpora here that begin with the documents of an order, by the digests of the order.
        self._sources = defaultdict[tuple[str, str], list[IndexedDataset]](list)
        for source in sources:
            for lengths in source.lengths_digests(count for count in counts.values() if count <= len(source)).values():
                for digests in digests_by_lengths.get(lengths, ()):
                    if source.beginnings_digest(counts[digests]) == digests[1]:
                        self._sources[digests].append(source)

    def read_again(self, train: GPTDataset | BlendedDataset, stop: int) -> Again:
        """How many tokens in the samples of `train` that the run reads, up to `stop`, were in those before."""
        first = self._here.first_sample
        read, uncounted = defaultdict[str, list[ReadTokens]](list), dict[str, None]()
        ends = [*(reading.first_sample for reading in self._readings[1:]), first]
        for reading, end in zip(self._readings, ends, strict=True):
            if not reading.tokenizer:
                uncounted[f"those before sample {end}, about which the checkpoint does not say what they are"] = None
            orders = reading.splits.get("train", ())
            for order, samples in zip(orders, drawn(orders, reading.first_sample, end), strict=True):
                if not samples:
                    continue
                why_not = self._why_uncounted(order, reading)
                if why_not is not None:
                    uncounted[f"those of {order.corpus}, {why_not}"] = None
                    continue
                for source in self._sources[order.digests]:
                    read[source.prefix].append(ReadTokens(source, order, samples.start, samples.stop))
        again = counted = 0
        for number in np.unique(np.linspace(first, stop - 1, min(stop - first, COUNTED_SAMPLES), dtype=np.int64)).tolist():
            source, documents, offsets = train.places_of(number)
            were_read = np.zeros(len(documents), dtype=bool)
            for tokens in read[source.prefix]:
                were_read |= tokens.contain(documents, offsets)
            again, counted = again + int(were_read.sum()), counted + len(documents)
        return Again(again, counted, tuple(uncounted))

    def moved(self, *, from_split: str, to_split: str) -> int:
        """How many documents of from_split in the last reading are of to_split here, without those that were of both before."""
        then = self._readings[-1]
        before, now = (self._documents_by_corpus(reading, to_split) for reading in (then, self._here))
        documents = defaultdict[tuple[str, str], set[range]](set)  # by digests, because a blend may name a corpus twice
        for order in then.splits.get(from_split, ()):
            documents[order.digests].add(order.documents)
        return sum(
            _count_moved(
                ours, *(set[range]().union(*(of.get(source.prefix, ()) for source in self._sources[digests])) for of in (before, now))
            )
            for digests, ours in documents.items()
        )

    def _documents_by_corpus(self, reading: Reading, split: str) -> dict[str, set[range]]:
        """The documents of a split in the corpora here, by their prefix."""
        found = defaultdict[str, set[range]](set)
        for order in reading.splits.get(split, ()):
            for source in self._sources[order.digests]:
                found[source.prefix].add(order.documents)
        return found

    def _why_uncounted(self, order: CorpusOrder, reading: Reading) -> str | None:
        if not self._sources[order.digests]:  # they may be in any corpus that the reading did not have beside it
            is_left_out = {order.digests for order in _orders_of([self._here])} <= {order.digests for order in _orders_of([reading])}
            return None if is_left_out else "whose earlier documents are not all there"
        epochs, documents = order.epochs, order.documents
        try:
            room = needed_bytes(epochs, len(documents)) + PLACE_BYTES * epochs.repeats * len(documents)
            check_room(room, epochs.sample_count, order.corpus, "train")
        except ValueError:
            return "whose earlier order takes more memory than this machine has left"
        return None


def drawn(orders: Sequence[CorpusOrder], first: int, stop: int) -> list[range]:
    """Which samples of each corpus are samples [first, stop) of their blend."""
    if len(orders) < 2:
        return [range(first, stop)] * len(orders)
    dataset, _ = deal_samples(np.array([order.share for order in orders], dtype=np.float64), stop)
    begins, ends = (np.bincount(dataset[:samples], minlength=len(orders)).tolist() for samples in (first, stop))
    return [range(begin, end) for begin, end in zip(begins, ends, strict=True)]


def _orders_of(readings: Sequence[Reading]) -> list[CorpusOrder]:
    return [order for reading in readings for orders in reading.splits.values() for order in orders]


def _count_moved(documents: set[range], before: set[range], now: set[range]) -> int:
    """How many of the documents are in `now` and not in `before`."""
    ends = sorted({place for part in documents | before | now for place in (part.start, part.stop)})
    count = 0
    for first, stop in pairwise(ends):  # all of these documents are in the same parts
        in_each = [any(first in part for part in parts) for parts in (documents, before, now)]
        count += (stop - first) * (in_each == [True, False, True])
    return count
