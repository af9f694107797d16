import pickle
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from harness.tiny_corpus import write_corpus, write_golden_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data import indexed_dataset
from megatron_zpp.data.indexed_dataset import IndexedDataset, best_dtype, check_token_ids
from megatron_zpp.system.user_error import UserError


def edit(path: str, position: int, replacement: bytes) -> None:
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:position] + replacement + content[position + len(replacement) :])


def cut(path: str, byte_count: int) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:-byte_count])


@settings(max_examples=50)
@given(
    dtype=st.sampled_from(["uint8", "int8", "int16", "uint16", "int32", "int64"]),
    documents=st.lists(st.lists(st.integers(0, 127), max_size=9), max_size=9),
)
def test_reader_gives_back_every_document(dtype: str, documents: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = IndexedDataset(write_corpus(Path(folder), documents, dtype))
        assert dataset.dtype == np.dtype(dtype)
        assert [dataset.read(i).tolist() for i in range(len(dataset))] == documents
        assert dataset.token_count == sum(map(len, documents))
        for i, document in enumerate(documents):
            assert dataset.read(i, 2, 5).tolist() == document[2:5]


def test_best_dtype_changes_at_65500() -> None:
    assert (best_dtype(65499), best_dtype(65500)) == (np.dtype("uint16"), np.dtype("int32"))


def test_pickled_dataset_opens_the_same_files(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path, [[1, 2], [3]]))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 500
    assert pickle.loads(pickled).read(1).tolist() == [3]


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path: Path, ending: str) -> None:
    prefix = write_golden_corpus(tmp_path)
    Path(f"{prefix}.{ending}").unlink()
    with pytest.raises(UserError, match=rf"corpus\.{ending} does not exist on this machine; a corpus is named by the common prefix"):
        IndexedDataset(prefix)


def test_a_file_name_given_as_prefix_is_recognised(tmp_path: Path) -> None:
    prefix = write_golden_corpus(tmp_path)
    with pytest.raises(UserError, match=rf"does not exist on this machine; did you mean {prefix}\? A corpus is"):
        IndexedDataset(f"{prefix}.bin")


def test_a_number_that_names_no_corpus_may_be_a_weight_of_a_blend_in_which_another_is_missing() -> None:
    with pytest.raises(UserError, match=r"^0\.3\.idx does not exist .*; if 0\.3 is a weight, every corpus needs one before it\. A corpus"):
        IndexedDataset("0.3")


@pytest.mark.parametrize("ending", [".bin", ".idx", ".jsonl"])
def test_a_prefix_is_proposed_only_if_it_exists(tmp_path: Path, ending: str) -> None:
    with pytest.raises(UserError, match="does not exist on this machine; a corpus is named by"):
        IndexedDataset(str(tmp_path / f"my_text{ending}"))
    made = write_corpus(tmp_path, [[1]], name="my_text_text_document")
    with pytest.raises(UserError, match=rf"did you mean {made}\?"):
        IndexedDataset(str(tmp_path / f"my_text{ending}"))


@pytest.mark.parametrize("words", ["my_txt", "my_txt.bin", "My_Text_document", "my_text_text_documnt", "my_text_text_documnt.idx"])
def test_a_misspelled_prefix_is_refused_with_the_corpus_of_a_like_name(tmp_path: Path, words: str) -> None:
    write_corpus(tmp_path, [[1]], name="other_corpus")
    made = write_corpus(tmp_path, [[1]], name="my_text_text_document")
    with pytest.raises(UserError, match=rf"does not exist on this machine; did you mean {made}\? A corpus"):
        IndexedDataset(str(tmp_path / words))


def test_a_corpus_of_another_name_with_the_same_ending_is_not_proposed(tmp_path: Path) -> None:
    for name in ("train_text_document", "my_text_text_document"):
        write_corpus(tmp_path, [[1]], name=name)
    for words in ("valid_text_document", "my_valid_text_document", "unlike"):
        with pytest.raises(UserError, match=r"does not exist on this machine; a corpus is named by"):
            IndexedDataset(str(tmp_path / words))


@pytest.mark.parametrize("words", ["folder", "folder/", "made_document"])
def test_a_folder_and_a_prefix_without_its_folder_are_refused_with_the_corpus_in_the_folder(tmp_path: Path, words: str) -> None:
    (tmp_path / "folder").mkdir()
    made = write_corpus(tmp_path / "folder", [[1]], name="made_document")
    with pytest.raises(UserError, match=rf"did you mean {made}\? A corpus"):
        IndexedDataset(f"{tmp_path}/{words}")


@pytest.mark.parametrize("words", ["a\0b", "a\ud800", "\0"])
def test_a_prefix_that_no_file_can_have_is_refused_like_any_other(words: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        IndexedDataset(words)


def test_prefixes_with_a_comma_between_them_are_refused_with_the_rule() -> None:
    with pytest.raises(UserError, match=r"^a,b\.idx does not exist .*; several corpora are separated by blanks\. A corpus"):
        IndexedDataset("a,b")


def test_a_corpus_of_which_one_file_is_missing_is_not_taken_for_another(tmp_path: Path) -> None:
    write_corpus(tmp_path, [[1]], name="corpus1")
    for ending in ("bin", "idx"):
        prefix = write_corpus(tmp_path, [[1]], name="corpus2")
        Path(f"{prefix}.{ending}").unlink()
        with pytest.raises(UserError, match=rf"corpus2\.{ending} does not exist on this machine; a corpus is named by"):
            IndexedDataset(prefix)


@pytest.mark.parametrize("words", ["my_text", "my_text.jsonl"])
def test_who_names_the_text_is_told_the_corpus_that_was_made_from_it(tmp_path: Path, words: str) -> None:
    prefix = write_golden_corpus(tmp_path)
    made = tmp_path / "my_text_text_document"
    Path(f"{prefix}.idx").rename(f"{made}.idx")
    with pytest.raises(UserError, match=rf"did you mean {made}\?"):
        IndexedDataset(str(tmp_path / words))


@pytest.mark.parametrize(
    ("position", "replacement", "message"),
    [
        (0, b"PK\x03\x04", r"starts with b'PK.*MMIDIDX.*check the prefix"),
        (0, b"TNTIDX\x00\x00", "legacy TNTIDX format.*preprocess_data"),
        (9, struct.pack("<Q", 2), "version 2, but version 1 is needed"),
        (17, b"\x07", "dtype code 7.*1 uint8"),
        (17, b"\x63", "dtype code 99.*8 uint16"),
        (18, struct.pack("<Q", 11), "truncated: it has 242 bytes, its header promises 254"),
        (18, struct.pack("<Q", 9), "has 242 bytes, its header promises 230"),
        (34, struct.pack("<i", 4), r"\.bin does not belong to its \.idx: it has 158 bytes, the \.idx needs 156"),
        (34, struct.pack("<i", 6), r"\.bin is truncated: it has 158 bytes, its \.idx needs 160"),
        (34 + 40, struct.pack("<q", 2), "contradicts itself"),
        (34 + 40 + 24, struct.pack("<q", 2**62), "contradicts itself"),
        (34 + 40 + 32, struct.pack("<q", -8), "contradicts itself"),
        (34 + 40 + 72, struct.pack("<q", 0), "contradicts itself"),
        (34, struct.pack("<2i", -5, 11), "contradicts itself"),
        (242 - 24, struct.pack("<q", 10), "contradicts itself"),
        (242 - 8, struct.pack("<q", 9), "contradicts itself"),
    ],
)
def test_a_damaged_index_is_refused_with_what_was_found(tmp_path: Path, position: int, replacement: bytes, message: str) -> None:
    prefix = write_golden_corpus(tmp_path)
    edit(f"{prefix}.idx", position, replacement)
    with pytest.raises(UserError, match=message) as caught:
        IndexedDataset(prefix)
    assert prefix in str(caught.value)


@pytest.mark.parametrize(
    ("byte_count", "message"), [(1, "241 bytes.*promises 242"), (220, "has 22 bytes.*needs 34"), (242, "is empty; copy it again")]
)
def test_a_truncated_index_is_refused(tmp_path: Path, byte_count: int, message: str) -> None:
    prefix = write_golden_corpus(tmp_path)
    cut(f"{prefix}.idx", byte_count)
    with pytest.raises(UserError, match=message):
        IndexedDataset(prefix)


def test_a_truncated_token_file_is_refused(tmp_path: Path) -> None:
    prefix = write_golden_corpus(tmp_path)
    cut(f"{prefix}.bin", 2)
    with pytest.raises(UserError, match=r"corpus\.bin is truncated: it has 156 bytes, its \.idx needs 158 \(79 tokens of uint16\)"):
        IndexedDataset(prefix)


def test_a_token_id_beyond_the_vocabulary_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_dataset, "TOKEN_CHUNK_NUMEL", 3)
    dataset = IndexedDataset(write_corpus(tmp_path, [[1, 2, 3], [], [4, 90, 91]]))
    check_token_ids(dataset, 92)
    with pytest.raises(UserError, match=r"corpus\.bin holds token id 90 \(document 2\).* 50 ids.*--vocab-size or --tokenizer-model"):
        check_token_ids(dataset, 50)


def test_a_negative_token_id_is_named(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_corpus(tmp_path, [[1], [-7]], "int32"))
    with pytest.raises(UserError, match=r"token id -7 \(document 1\)"):
        check_token_ids(dataset, 50)
