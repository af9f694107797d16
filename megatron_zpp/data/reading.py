"""What the order of a run's samples depends on, as checkpoints keep it: the run that goes on compares it with its own (no torch)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_zpp.config.counted import counted
from megatron_zpp.config.data_sources import SPLITS
from megatron_zpp.config.sample_lengths import merged
from megatron_zpp.data.epochs import Epochs, plan_epochs
from megatron_zpp.system.outside import Members


@dataclass(frozen=True)
class CorpusOrder:
    """Everything that decides the order of the samples of one corpus in one split.

    corpus: its file name. lengths_sha256, beginnings_sha256, document_count: of all its documents (see IndexedDataset).
    first_document, stop_document, token_count: of the split. sample_count: asked for; 0 for one pass over it. share: in its blend.
    """

    corpus: str
    lengths_sha256: str
    beginnings_sha256: str
    document_count: int
    first_document: int
    stop_document: int
    token_count: int
    sample_count: int
    seq_length: int
    seed: int
    share: float = 1.0

    @property
    def documents(self) -> range:
        return range(self.first_document, self.stop_document)

    @property
    def digests(self) -> tuple[str, str]:
        """The same for two corpora if they are the same, as far as it is known, whatever their names and splits are."""
        return self.lengths_sha256, self.beginnings_sha256

    @property
    def epochs(self) -> Epochs:
        """How often the tokens of the split are read. It has tokens."""
        return plan_epochs(self.token_count, sample_count=self.sample_count, seq_length=self.seq_length)

    def other_documents(self, here: CorpusOrder) -> Iterator[str]:
        """What makes the documents of `here` others, with both values."""
        if self.document_count != here.document_count:
            yield f"{counted(self.document_count, 'document')} there and {here.document_count} here"
        elif self.digests != here.digests:
            yield "other documents"
        elif self.documents != here.documents:
            yield f"documents {_in_words(self.documents)} there and {_in_words(here.documents)} here"

    def other_order(self, here: CorpusOrder) -> Iterator[str]:
        """What makes the order of `here` another one where the documents are the same, with both values."""
        if self.share != here.share:
            # 91 and 0.91 may differ in the last bit of a share, which decides which of equal corpora is drawn first.
            digits = 4 if f"{self.share:.4g}" != f"{here.share:.4g}" else 17
            yield f"a share of {self.share:.{digits}g} there and {here.share:.{digits}g} here"
        if self.seq_length != here.seq_length:
            yield f"samples of {self.seq_length} tokens there and {here.seq_length} here"
        if self.seed != here.seed:
            yield f"seed {self.seed} there and {here.seed} here"
        if (self.token_count, self.seq_length) == (here.token_count, here.seq_length) and self.epochs != here.epochs:
            yield f"{self.sample_count} samples in order there and {here.sample_count} here"


@dataclass(frozen=True)
class Reading:
    """What a run reads from sample `first_sample` on: corpora by split, each with its order; none for generated samples.

    seq_length: tokens of a sample. tokenizer: in words; empty if only seq_length is known.
    """

    first_sample: int
    seq_length: int
    tokenizer: str
    splits: Mapping[str, tuple[CorpusOrder, ...]]

    def differences(self, here: Reading, split: str) -> list[str]:
        """What makes the documents of a split in `here` others, or the order of its training samples, in words."""
        found = []
        theirs, ours = self.splits.get(split, ()), here.splits.get(split, ())
        for then, now in _paired(theirs, ours):
            if then is not None and now is not None:
                found += [f"{now.corpus} has {difference}" for difference in then.other_documents(now)]
                found += [f"{now.corpus} has {difference}" for difference in then.other_order(now) if split == "train"]
            elif then is not None:
                found.append(f"{then.corpus} is left out")
            elif now is not None:
                found.append(f"{now.corpus} is new")
        if not found and split == "train" and [then.digests for then in theirs] != [now.digests for now in ours]:
            found.append("the corpora have another order")
        return found


def readings_of(found: Members) -> tuple[Reading, ...]:
    """The readings of a run in the state that a manifest keeps. They begin at sample 0 and at ever later ones."""
    readings = tuple(_reading_of(members) for members in found.list_of_members("readings"))
    starts = [reading.first_sample for reading in readings]
    if starts[:1] != [0] or starts != sorted(set(starts)):
        found.refuse("readings", "a list of readings that begin at sample 0 and at ever later samples")
    return readings


def samples_by_length(readings: Sequence[Reading], consumed_samples: int) -> tuple[tuple[int, int], ...]:
    """How many of the consumed samples had how many tokens each, in order."""
    ends = [*(reading.first_sample for reading in readings[1:]), consumed_samples]
    return merged((end - reading.first_sample, reading.seq_length) for reading, end in zip(readings, ends, strict=False))


def _reading_of(found: Members) -> Reading:
    splits = found.members("splits")
    splits.require_only(set(SPLITS))
    orders = {split: tuple(_corpus_order_of(members) for members in splits.list_of_members(split)) for split in splits.values}
    return Reading(found.count("first_sample"), found.positive_count("seq_length"), found.text("tokenizer"), orders)


def _corpus_order_of(found: Members) -> CorpusOrder:
    values: dict[str, Any] = {"share": found.number("share")}
    for member in fields(CorpusOrder):
        if member.type == "str":
            values[member.name] = found.text(member.name)
        elif member.type == "int":
            values[member.name] = found.count(member.name)
    order = CorpusOrder(**values)
    for key in ("seq_length", "token_count"):
        found.positive_count(key)
    if not order.first_document <= order.stop_document <= order.document_count:
        found.refuse("stop_document", "at least first_document and at most document_count")
    return order


def _paired(theirs: Sequence[CorpusOrder], ours: Sequence[CorpusOrder]) -> Iterator[tuple[CorpusOrder | None, CorpusOrder | None]]:
    """Each corpus beside one here: of the same documents and file name, or else of the same documents, or else of the same file name.

    None if there is none.
    """
    found = dict[int, int]()  # places in `ours` by those in `theirs`
    for name_of in (lambda order: (*order.digests, order.corpus), lambda order: order.digests, lambda order: order.corpus):
        taken, rest = set(found.values()), defaultdict[Any, list[int]](list)
        for place, now in enumerate(ours):
            if place not in taken:
                rest[name_of(now)].append(place)
        for place, then in enumerate(theirs):
            if place not in found and rest[name_of(then)]:
                found[place] = rest[name_of(then)].pop(0)
    yield from ((then, ours[found[place]] if place in found else None) for place, then in enumerate(theirs))
    taken = set(found.values())
    yield from ((None, now) for place, now in enumerate(ours) if place not in taken)


def _in_words(documents: range) -> str:
    return f"{documents.start} to {documents.stop - 1}" if documents else "none"
