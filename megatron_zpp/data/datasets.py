"""Builds the training, validation and test data of a run from the flags that name corpora, or from --mock-data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_zpp.config.data_sources import DataSources, read_sources
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.blend import blended_dataset, plan_by_epochs, plan_by_weights
from megatron_zpp.data.build_once import SILENT, ProgressPrinter
from megatron_zpp.data.corpus import Corpus, SampleOrder, folder_of
from megatron_zpp.data.documents import DocumentRules
from megatron_zpp.data.gpt_dataset import ChainedDataset, MockDataset, SampleSource
from megatron_zpp.data.indexed_dataset import CHECKED_DOCUMENTS, IndexedDataset
from megatron_zpp.data.reading import CorpusOrder
from megatron_zpp.data.repetition import repetition
from megatron_zpp.data.split_corpora import SPLIT_WORDS, SplitCorpora


class SampleCounts(NamedTuple):
    train: int
    valid: int
    test: int


@dataclass(frozen=True)
class DataRequest:
    """What a run needs from its data.

    vocab_size: used for mock data only. eod: the id of the end-of-document token.
    validates_on_all: validate on every sample of every validation corpus once, whatever sample_counts says.
    read_samples: how many samples training reads, if it has more in its order; None if it reads all of them.
    """

    seq_length: int
    seed: int
    sample_counts: SampleCounts
    vocab_size: int
    eod: int
    validates_on_all: bool = False
    read_samples: int | None = None


class Datasets(NamedTuple):
    train: SampleSource
    valid: Mapping[str, SampleSource]  # by name; a single set without a name has the key ""
    test: SampleSource | None
    sources: tuple[IndexedDataset, ...]  # all corpora, each once; empty for mock data
    orders: Mapping[str, tuple[CorpusOrder, ...]]  # of the samples of each split
    rules: DocumentRules
    messages: tuple[str, ...]  # for one rank to print


def count_samples(*, train_samples: int, train_iters: int, eval_interval: int, evaluated_samples: int) -> SampleCounts:
    """How many samples a run draws of each split. It evaluates every eval_interval iterations and at the end, and tests once."""
    evaluations = train_iters // eval_interval + 1
    return SampleCounts(train_samples, evaluations * evaluated_samples, evaluated_samples)


def build_datasets(data: DataConfig, request: DataRequest, progress: ProgressPrinter = SILENT) -> Datasets:
    """The datasets of a run, each with the samples that `request` asks for. data: of a resolved configuration.

    A validation or test split without tokens is left out, and a message says so. Every rank must call this. Ranks that share a cache folder
    build an index once; `progress` prints while a build takes long.
    Raises UserError for unusable files, an unusable --split, or a training split without tokens.
    """
    rules = DocumentRules(request.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    if data.mock_data:
        return _mock_datasets(request, rules)
    order = SampleOrder(request.seq_length, request.seed, _cache_path(data))
    return CorpusSet(data, read_sources(data), order, progress).datasets(request, rules)


def cache_folder(data: DataConfig, source: IndexedDataset) -> Path:
    """The folder for files derived from a corpus: --data-cache-path if given, else a folder beside the corpus."""
    return folder_of(_cache_path(data), source.prefix)


def _cache_path(data: DataConfig) -> Path | None:
    return Path(data.data_cache_path) if data.data_cache_path else None


def _mock_datasets(request: DataRequest, rules: DocumentRules) -> Datasets:
    train, valid, test = (
        MockDataset(seed=request.seed, stream=stream, seq_length=request.seq_length, vocab_size=request.vocab_size, sample_count=count)
        for stream, count in enumerate(request.sample_counts)
    )
    return Datasets(train, {"": valid}, test, (), {}, rules, ())


def _names_of(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """The file names of corpora, or their full prefixes if two file names are equal."""
    names = tuple(Path(prefix).name for prefix in prefixes)
    return names if len(set(names)) == len(names) else prefixes


def _missing_ends_warning(source: IndexedDataset, rules: DocumentRules) -> str | None:
    """A warning if the rules need ends of documents and the first documents have none; else None."""
    if not (rules.resets_positions or rules.resets_attention or rules.masks_loss):
        return None
    if rules.eod in source.last_tokens():
        return None
    return (
        f"WARNING: none of the first {min(CHECKED_DOCUMENTS, len(source))} documents of {source.prefix} ends in the end-of-document token "
        f"{rules.eod}, so --reset-position-ids, --reset-attention-mask and --eod-mask-loss find no end of a document; preprocess with "
        "--append-eod."
    )


class CorpusSet:
    """All corpora of a run, each opened once, and the messages about them."""

    def __init__(self, data: DataConfig, sources: DataSources, order: SampleOrder, progress: ProgressPrinter) -> None:
        self._surplus = data.mid_level_dataset_surplus
        self._normalization = data.blend_normalization
        self._progress = progress
        self._has_separate_sets = data.multiple_validation_sets
        self._set_names = data.validation_set_names
        self._messages: list[str] = []
        self._corpora = SplitCorpora(sources, data.split, lambda prefix, split: Corpus(prefix, split, order))

    def datasets(self, request: DataRequest, rules: DocumentRules) -> Datasets:
        counts = request.sample_counts
        used, left_out = self._corpora.used_for_training()
        self._messages += left_out
        train = self._drawn("train", used, counts.train)
        if train is None:
            raise RuntimeError(f"0 samples are requested from the training data of {', '.join(self._corpora.by_prefix)}")
        valid = self._validation_sets(request)
        test = self._held_out("test", counts.test, request)
        self._warn_of_repeated_corpora()
        sources = tuple(corpus.source for corpus in self._corpora.by_prefix.values())
        self._messages += [message for source in sources if (message := _missing_ends_warning(source, rules)) is not None]
        lines = repetition(used, request.read_samples or counts.train, request.seq_length)
        datasets = {"train": [train], "valid": list(valid.values()), "test": [test] if test is not None else []}
        orders = {split: tuple(order for dataset in found for order in dataset.orders()) for split, found in datasets.items()}
        return Datasets(train, valid, test, sources, orders, rules, tuple(dict.fromkeys([*self._messages, *lines])))

    def _validation_sets(self, request: DataRequest) -> dict[str, SampleSource]:
        """The validation sets by name, without empty ones, and without those shorter than a sample if each is read whole."""
        on_all, sample_count = request.validates_on_all, request.sample_counts.valid
        blend = self._corpora.blends.get("valid")
        if blend is None:
            return {}
        if not self._has_separate_sets and not on_all:
            dataset = self._held_out("valid", sample_count, request)
            return {} if dataset is None else {"": dataset}
        names = self._set_names or _names_of(blend.prefixes)
        found: dict[str, SampleSource] = {}
        for name, prefix in zip(names, blend.prefixes, strict=True):
            corpus = self._corpora.by_prefix[prefix]
            if not self._can_validate(corpus, on_all=on_all):
                continue
            found[name] = corpus.dataset("valid", 0 if on_all else sample_count, self._progress, self._messages)
            if not on_all:
                self._messages += repetition([(corpus, 1)], request.sample_counts.test, request.seq_length, "valid", name)
        if self._has_separate_sets or not found:
            return found
        return {"": ChainedDataset(list(found.values()))}

    def _can_validate(self, corpus: Corpus, *, on_all: bool) -> bool:
        if corpus.token_count("valid") == 0:
            self._messages.append(corpus.why_empty("valid"))
            return False
        if on_all and corpus.samples_per_epoch("valid") == 0:
            self._messages.append(f"The validation split of {corpus.prefix} is shorter than one sample: it is left out.")
            return False
        return True

    def _held_out(self, split_name: str, sample_count: int, request: DataRequest) -> SampleSource | None:
        """The validation or test data; None if there are none."""
        if split_name not in self._corpora.blends:
            return None
        used, left_out = self._corpora.used(split_name)
        self._messages += left_out
        if not used:
            return None
        self._messages += repetition(used, request.sample_counts.test, request.seq_length, split_name)  # a test is one evaluation
        return self._drawn(split_name, used, sample_count)

    def _drawn(self, split_name: str, used: Sequence[tuple[Corpus, float]], sample_count: int) -> SampleSource | None:
        """The samples of a split. used: its corpora, each with its weight. None if a blend has none to draw."""
        blend = self._corpora.blends[split_name]
        if blend.is_plain:
            return used[0][0].dataset(split_name, sample_count, self._progress, self._messages)
        if sample_count == 0:
            return None
        corpora, shares = [corpus for corpus, _ in used], [weight for _, weight in used]
        if blend.weights is not None:
            plan = plan_by_weights(shares, sample_count, self._surplus, self._normalization)
        else:
            plan = plan_by_epochs([int(share) for share in shares], sample_count)
        return blended_dataset(corpora, plan, split_name, self._progress, self._messages)

    def _warn_of_repeated_corpora(self) -> None:
        for name, blend in self._corpora.blends.items():
            repeated = {prefix for prefix in blend.prefixes if blend.prefixes.count(prefix) > 1}
            if repeated:
                names = ", ".join(sorted(repeated))
                self._messages.append(
                    f"WARNING: the {SPLIT_WORDS[name]} blend names {names} more than once, and draws the same samples for each; "
                    "name it once with a larger weight to draw further samples instead."
                )
