from __future__ import annotations

from pathlib import Path

import pytest
from harness.tiny_corpus import counting_documents, write_corpus

from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.datasets import DataRequest, Datasets, SampleCounts, build_datasets
from megatron_zpp.data.gpt_dataset import ChainedDataset, MockDataset


def build(data: DataConfig, *, validates_on_all: bool) -> Datasets:
    return build_datasets(data, DataRequest(8, 1234, SampleCounts(6, 3, 1), vocab_size=100, eod=99, validates_on_all=validates_on_all))


def corpora(folder: Path) -> tuple[str, ...]:
    """Three datasets of 41, 9 and 5 tokens; they yield 5, 1 and 0 samples of 8 tokens."""
    return tuple(write_corpus(folder, counting_documents([length]), name=name) for name, length in [("a", 41), ("b", 9), ("c", 5)])


def test_a_chain_is_its_parts_one_after_the_other() -> None:
    parts = [MockDataset(seed=1, stream=stream, seq_length=4, vocab_size=9, sample_count=count) for stream, count in enumerate((2, 0, 3))]
    chain = ChainedDataset(parts)
    found = [chain[index]["tokens"].tolist() for index in range(len(chain))]
    assert found == [part[index]["tokens"].tolist() for part in parts for index in range(len(part))]
    with pytest.raises(IndexError, match="sample 5 of 5"):
        chain[5]


def test_whole_validation_holds_every_sample_of_every_corpus_once(tmp_path: Path) -> None:
    paths = corpora(tmp_path)
    datasets = build(DataConfig(train_data_path=paths[:1], valid_data_path=paths), validates_on_all=True)
    (valid,) = datasets.valid.values()
    first_tokens = sorted(int(valid[index]["tokens"][0]) for index in range(len(valid)))
    assert first_tokens == sorted([0, 8, 16, 24, 32, 0])
    assert datasets.messages[0] == f"The validation split of {paths[2]} is shorter than one sample: it is left out."


def test_each_validation_set_has_its_name_and_its_samples(tmp_path: Path) -> None:
    paths = corpora(tmp_path)
    data = DataConfig(train_data_path=paths[:1], valid_data_path=paths[:2], multiple_validation_sets=True)
    assert {name: len(dataset) for name, dataset in build(data, validates_on_all=True).valid.items()} == {"a": 5, "b": 1}
    drawn = build(data, validates_on_all=False).valid
    assert list(drawn) == ["a", "b"] and all(len(dataset) >= 3 for dataset in drawn.values())
    (tmp_path / "more").mkdir()
    twins = (paths[0], write_corpus(tmp_path / "more", counting_documents([30]), name="a"))
    data = DataConfig(train_data_path=paths[:1], valid_data_path=twins, multiple_validation_sets=True)
    assert tuple(build(data, validates_on_all=True).valid) == twins
    data = DataConfig(
        train_data_path=paths[:1], valid_data_path=twins, multiple_validation_sets=True, validation_set_names=("wiki", "code")
    )
    assert tuple(build(data, validates_on_all=True).valid) == ("wiki", "code")


def test_sets_of_a_split_blend_are_cut_from_each_corpus(tmp_path: Path) -> None:
    paths = tuple(write_corpus(tmp_path, counting_documents([20] * 10), name=name) for name in ("a", "b"))
    datasets = build(DataConfig(data_path=paths, split="80,20", multiple_validation_sets=True), validates_on_all=True)
    assert {name: len(dataset) for name, dataset in datasets.valid.items()} == {"a": 4, "b": 4}
