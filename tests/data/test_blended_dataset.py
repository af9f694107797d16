from pathlib import Path

import numpy as np
import pytest
from harness.tiny_corpus import GOLDEN, counting_documents, open_dataset, write_corpus

from megatron_zpp.data.blended_dataset import BlendedDataset, SourceTally, build_blend_indices
from megatron_zpp.data.gpt_dataset import GPTDataset, MockDataset


def datasets(folder: Path, sample_counts: list[int]) -> list[GPTDataset]:
    found = []
    for number, count in enumerate(sample_counts):
        prefix = write_corpus(folder, counting_documents([3, 8, 5]), name=f"corpus_{number}")
        found.append(open_dataset(prefix, range(3), sample_count=count, seq_length=4, seed=number))
    return found


def test_samples_are_those_of_the_datasets_in_megatrons_order(tmp_path: Path) -> None:
    golden = GOLDEN["blend"]
    parts = datasets(tmp_path, [12, 6, 2])
    blend = BlendedDataset(parts, build_blend_indices(golden["weights"], golden["size"]))
    assert len(blend) == golden["size"]
    for index, (dataset, sample) in enumerate(zip(golden["dataset_index"], golden["dataset_sample_index"], strict=True)):
        assert blend[index]["tokens"].tolist() == parts[dataset][sample]["tokens"].tolist()


def test_a_dataset_with_fewer_samples_than_are_drawn_is_refused_before_the_first_one(tmp_path: Path) -> None:
    parts = datasets(tmp_path, [1, 1])
    with pytest.raises(RuntimeError, match="the blend draws 10 samples of .*corpus_0, which was built for 3"):
        BlendedDataset(parts, build_blend_indices([0.5, 0.5], 20))


@pytest.mark.parametrize("index", [-1, 20])
def test_an_index_outside_of_the_blend_is_refused(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"sample {index} of 20 in a blend of 2 datasets"):
        BlendedDataset(datasets(tmp_path, [20, 20]), build_blend_indices([0.5, 0.5], 20))[index]


def test_consumed_samples_are_counted_by_source_however_often_one_asks(tmp_path: Path) -> None:
    golden = GOLDEN["blend"]
    parts = datasets(tmp_path, [12, 6, 2])
    blend = BlendedDataset(parts, build_blend_indices(golden["weights"], golden["size"]))
    often, once = SourceTally(blend), SourceTally(blend)
    for consumed in (0, 3, 4, 20, 31, 47):
        latest = often.up_to(consumed)
    order = np.resize(golden["dataset_index"], 47)  # past its end the blend starts over
    assert latest == once.up_to(47) == {part.source.prefix: int((order == number).sum()) for number, part in enumerate(parts)}


def test_a_single_corpus_and_mock_data_are_counted_too(tmp_path: Path) -> None:
    (part,) = datasets(tmp_path, [4])
    assert SourceTally(part).up_to(9) == {part.source.prefix: 9}
    assert SourceTally(MockDataset(seed=1, stream=0, seq_length=4, vocab_size=9, sample_count=5)).up_to(7) == {"mock data": 7}
