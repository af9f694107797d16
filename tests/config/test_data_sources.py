import json
from pathlib import Path

import pytest

from megatron_zpp.config.data_sources import Blend, DataSources, parse_blend, read_sources
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.schema import DataConfig


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        ("a", Blend(("a",), None)),
        ("a b", Blend(("a", "b"), None)),
        ("a b c", Blend(("a", "b", "c"), None)),
        ("0.7 a 3e-1 b", Blend(("a", "b"), (0.7, 0.3))),
        ("30 a", Blend(("a",), (30.0,))),
        ("1 a b c", Blend(("1", "a", "b", "c"), None)),  # as Megatron: one word that is not a number makes all of them prefixes
        ("1 2 3", Blend(("1", "2", "3"), None)),
    ],
)
def test_both_forms_of_a_blend_are_told_apart_as_megatron_does(words: str, blend: Blend) -> None:
    assert parse_blend("--data-path", words.split()) == blend


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "0.0"])
def test_a_weight_that_is_not_a_positive_number_is_refused(weight: str) -> None:
    with pytest.raises(FlagError, match=f"--data-path: a weight must be a positive number, not {weight}; leave out"):
        parse_blend("--data-path", ["0.5", "a", weight, "b"])


@pytest.mark.parametrize(("words", "turned"), [("a 0.5 b 0.5", "0.5 a 0.5 b"), ("a 30", "30 a"), ("a 1 b 2 c 3", "1 a 2 b ...")])
def test_weights_after_their_prefixes_are_refused_with_the_right_order(words: str, turned: str) -> None:
    with pytest.raises(FlagError, match=f"^--data-path has weights after .*; a weight comes before its prefix: {turned}$"):
        parse_blend("--data-path", words.split())


def test_weights_without_a_finite_sum_are_refused() -> None:
    with pytest.raises(FlagError, match="--data-path has weights whose sum is too large for a number; give weights near 1"):
        parse_blend("--data-path", ["1e308", "a", "1e308", "b"])


def test_each_split_may_have_corpora_of_its_own() -> None:
    found = read_sources(DataConfig(train_data_path=("0.5", "a", "0.5", "b"), test_data_path=("c",)))
    assert found == DataSources(None, {"train": Blend(("a", "b"), (0.5, 0.5)), "test": Blend(("c",), None)})


def test_a_file_of_words_is_read_like_the_flag(tmp_path: Path) -> None:
    words = [word for number in range(1000) for word in ("1", f"corpus_{number}")]
    (tmp_path / "data.txt").write_text("\n".join(words))
    found = read_sources(DataConfig(data_args_path=str(tmp_path / "data.txt")))
    assert found == read_sources(DataConfig(data_path=tuple(words)))
    assert found.common is not None and len(found.common.prefixes) == 1000


def test_a_json_file_names_corpora_by_split(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps({"train": [0.25, "a", 0.75, "b"], "valid": ["c"], "test": None}))
    found = read_sources(DataConfig(per_split_data_args_path=str(tmp_path / "data.json")))
    assert found == DataSources(None, {"train": Blend(("a", "b"), (0.25, 0.75)), "valid": Blend(("c",), None)})


@pytest.mark.parametrize("text", ["nonsense", "[]", '{"training": ["a"]}', '{"train": "a"}', '{"train": ["a"], "train": ["b"]}'])
def test_a_json_file_of_another_kind_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(FlagError, match="--per-split-data-args-path .* a JSON object of lists of words"):
        read_sources(DataConfig(per_split_data_args_path=str(tmp_path / "data.json")))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataConfig(data_path=("a",), train_data_path=("b",)), "--data-path and --train-data-path exclude each other"),
        (DataConfig(data_path=("a",), data_args_path="file"), "--data-path and --data-args-path exclude each other"),
        (DataConfig(valid_data_path=("b",)), "--valid-data-path leaves training without a corpus"),
        (DataConfig(data_args_path="nowhere"), "--data-args-path nowhere does not exist on this machine"),
        (DataConfig(data_args_path="/dev/null"), "--data-args-path /dev/null cannot be read \\(it is a device, not a regular file\\)"),
        (DataConfig(per_split_data_args_path="nowhere"), "--per-split-data-args-path nowhere does not exist on this machine"),
    ],
)
def test_flags_that_cannot_be_together_or_read_are_refused(data: DataConfig, words: str) -> None:
    with pytest.raises(FlagError, match=words):
        read_sources(data)
