from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.tiny_corpus import GOLDEN, counting_documents, write_corpus, write_golden_corpus

from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.datasets import DataRequest, Datasets, SampleCounts, build_datasets, count_samples
from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.data.split_corpora import SplitCorpora
from megatron_zpp.system.user_error import UserError


def build(data: DataConfig, counts: tuple[int, int, int] = (6, 3, 1), seq_length: int = 8) -> Datasets:
    return build_datasets(data, DataRequest(seq_length, 1234, SampleCounts(*counts), vocab_size=100, eod=99))


def train_of(datasets: Datasets) -> GPTDataset:
    assert isinstance(datasets.train, GPTDataset)
    return datasets.train


def test_three_splits_equal_megatrons(tmp_path: Path) -> None:
    golden = GOLDEN["three_splits"]
    datasets = build(DataConfig(data_path=(write_golden_corpus(tmp_path),), split=golden["split"]))
    for name, dataset in (("train", datasets.train), ("valid", datasets.valid[""]), ("test", datasets.test)):
        assert dataset is not None
        assert (len(dataset), dataset[0]["tokens"].tolist()) == (golden[name]["length"], golden[name]["first"])
    assert datasets.messages == (
        "test data: 6 tokens, read by each evaluation 1.33 times",
        "training data: 43 tokens, read 1.12 times",
    )


def test_fifteen_documents_at_the_default_split_train_and_say_what_is_empty(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, counting_documents([4] * 15))
    datasets = build(DataConfig(data_path=(prefix,)))
    assert (datasets.valid, datasets.test) == ({}, None)
    assert len(datasets.train) >= 6
    assert [message.split(" split")[0] for message in datasets.messages] == ["The validation", "The test"]
    assert "--split 969, 30, 1 cuts its 15 documents into 15, 0, 0" in datasets.messages[0]


def test_a_split_whose_documents_are_all_empty_counts_as_empty(tmp_path: Path) -> None:
    datasets = build(DataConfig(data_path=(write_corpus(tmp_path, [[1, 2, 3], []]),), split="1,1"))
    assert datasets.valid == {}
    assert datasets.messages[0].endswith("is empty: its 1 document holds no token.")


@pytest.mark.parametrize("documents, why", [([], "--split 1,1 cuts its 0"), ([[]], "--split 1,1 cuts its 1"), ([[], [1, 2]], "its 1")])
def test_an_empty_training_split_is_an_error(tmp_path: Path, documents: list[list[int]], why: str) -> None:
    with pytest.raises(UserError, match=f"training split of .* is empty: {why} documents? .* Give training a larger share"):
        build(DataConfig(data_path=(write_corpus(tmp_path, documents),), split="1,1"))


def test_a_run_says_how_often_it_reads_its_tokens_if_more_than_once(tmp_path: Path) -> None:
    small, large = (write_corpus(tmp_path, [[1] * length], name=f"of_{length}") for length in (20, 4000))
    assert build(DataConfig(train_data_path=(small,)), (5, 0, 0), seq_length=4).messages == ()
    repeated = build(DataConfig(train_data_path=(small,)), (2400, 0, 0), seq_length=4).messages
    assert repeated == ("training data: 20 tokens, read 480 times",)
    blend = DataConfig(train_data_path=("1", small, "9", large))
    assert build(blend, (200, 0, 0), seq_length=4).messages == ()  # 80 of 20 tokens, 720 of 4000
    assert build(blend, (300, 0, 0), seq_length=4).messages == (f"training data, read more than 4 times: {small} 6 times",)
    both = build(blend, (6030, 0, 0), seq_length=4).messages
    assert both == (
        "training data: 4020 tokens, read 6 times",
        f"training data, read more than 4 times: {small} 121 times, {large} 5.43 times",
    )
    twice = build(DataConfig(train_data_path=("1", small, "1", small)), (50, 0, 0), seq_length=4).messages
    assert "training data: 20 tokens, read 10 times" in twice


def test_held_out_data_that_an_evaluation_reads_more_than_once_are_named(tmp_path: Path) -> None:
    train, short, small = (write_corpus(tmp_path, [[1] * length], name=f"of_{length}") for length in (4000, 3, 20))
    counts = (5, 40, 10)  # 4 evaluations of 10 samples, 40 tokens each

    def said(seq_length: int = 4, **data: Any) -> tuple[str, ...]:
        return build(DataConfig(train_data_path=(train,), **data), counts, seq_length=seq_length).messages

    assert said(valid_data_path=(train,), test_data_path=(train,)) == ()
    shorter_than_a_sample = said(valid_data_path=(short,), test_data_path=(small,))
    assert shorter_than_a_sample == (
        "validation data: 3 tokens, read by each evaluation 13 times",
        "test data: 20 tokens, read by each evaluation 2 times",
    )
    blend = said(valid_data_path=("1", short, "1", train))
    assert blend == (f"validation data, read by each evaluation more than 4 times: {short} 6.67 times",)
    separate = said(valid_data_path=(short, train), multiple_validation_sets=True)
    assert separate == ("validation data of_3: 3 tokens, read by each evaluation 13 times",)


def test_samples_that_are_only_put_in_order_are_not_counted_as_read(tmp_path: Path) -> None:
    data = DataConfig(train_data_path=(write_corpus(tmp_path, [[1] * 20]),))
    request = DataRequest(4, 1234, SampleCounts(2400, 0, 0), vocab_size=100, eod=99, read_samples=50)
    assert build_datasets(data, request).messages == ("training data: 20 tokens, read 10 times",)


def test_the_corpora_of_each_split_are_chosen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, used = list[str](), SplitCorpora.used
    monkeypatch.setattr(SplitCorpora, "used", lambda corpora, split: (asked.append(split), used(corpora, split))[1])
    build(DataConfig(data_path=(write_golden_corpus(tmp_path),)))
    assert asked == ["train", "valid", "test"]


def test_indices_are_cached_beside_the_data_unless_told_otherwise(tmp_path: Path) -> None:
    prefix = write_golden_corpus(tmp_path)
    build(DataConfig(data_path=(prefix,)))
    build(DataConfig(data_path=(prefix,), data_cache_path=str(tmp_path / "elsewhere")))
    beside = sorted(path.name for path in Path(f"{prefix}.cache").iterdir())
    assert beside == sorted(path.name for path in (tmp_path / "elsewhere").iterdir())


def test_changed_data_never_meets_the_old_cache(tmp_path: Path) -> None:
    build(DataConfig(data_path=(write_corpus(tmp_path, counting_documents([5, 5, 20])),), split="1"))
    prefix = write_corpus(tmp_path, counting_documents([20, 5, 5]))
    again = train_of(build(DataConfig(data_path=(prefix,), split="1")))
    fresh = train_of(build(DataConfig(data_path=(prefix,), split="1", data_cache_path=str(tmp_path / "fresh"))))
    for left, right in zip(again.indices, fresh.indices, strict=True):
        assert np.array_equal(left, right)


@pytest.mark.parametrize(("split", "train_count", "seq_length"), [("80,20", 6, 8), ("1", 60, 8), ("1", 6, 4)])
def test_other_requests_never_meet_each_others_cache(tmp_path: Path, split: str, train_count: int, seq_length: int) -> None:
    prefix = write_golden_corpus(tmp_path)
    build(DataConfig(data_path=(prefix,), data_cache_path=str(tmp_path / "shared"), split="1"))
    shared, alone = (
        build(DataConfig(data_path=(prefix,), data_cache_path=str(tmp_path / folder), split=split), (train_count, 3, 1), seq_length)
        for folder in ("shared", "alone")
    )
    for left, right in zip(train_of(shared).indices, train_of(alone).indices, strict=True):
        assert np.array_equal(left, right)


def test_an_unwritable_place_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = DataConfig(data_path=(write_golden_corpus(tmp_path),), split="80,10,10", data_cache_path=str(tmp_path / "file" / "cache"))
    datasets = build(data, counts=(5, 3, 0))
    assert len(datasets.messages) == 1
    assert "built in memory" in datasets.messages[0]


def test_mock_data_needs_no_files_and_its_splits_differ() -> None:
    datasets = build(DataConfig(mock_data=True))
    assert datasets.sources == ()
    assert (len(datasets.train), len(datasets.valid[""])) == (6, 3)
    assert datasets.train[0]["tokens"].tolist() != datasets.valid[""][0]["tokens"].tolist()


def test_a_corpus_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"nowhere\.idx does not exist"):
        build(DataConfig(data_path=("nowhere",)))


def test_a_blend_asked_for_no_training_samples_is_a_broken_promise(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path, counting_documents([20]), name=name) for name in "ab"]
    with pytest.raises(RuntimeError, match="0 samples are requested"):
        build(DataConfig(data_path=("1", prefixes[0], "1", prefixes[1]), split="1"), counts=(0, 0, 0))


def test_sample_counts_are_megatrons() -> None:
    assert count_samples(train_samples=100 * 8, train_iters=100, eval_interval=30, evaluated_samples=5 * 8) == (800, 4 * 5 * 8, 5 * 8)


@pytest.mark.parametrize(
    ("place", "remedy"), [(0, "lower --train-iters or --train-samples"), (1, "lower --eval-iters, or"), (2, "lower --eval-iters")]
)
@pytest.mark.parametrize("what", ["indices", "blend"])
def test_more_samples_than_memory_can_index_are_refused_by_their_flag_before_anything_is_built(
    tmp_path: Path, place: int, remedy: str, what: str
) -> None:
    counts = [6, 3, 1]
    counts[place] = 10**12
    names = "ab" if what == "blend" else "a"
    prefixes = [write_corpus(tmp_path, counting_documents([40] * 9), name=name) for name in names]
    message = f"{what} of .* would take at least .* GB of memory for 10+[0-9]* samples, and this machine has .*; {remedy}"
    with pytest.raises(UserError, match=message):
        build(DataConfig(data_path=tuple(prefixes), split="1,1,1"), (counts[0], counts[1], counts[2]))
