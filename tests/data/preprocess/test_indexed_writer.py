import errno
import hashlib
import io
import multiprocessing
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from itertools import accumulate, product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from harness.patience import PATIENCE_SECONDS
from harness.tiny_corpus import GOLDEN, write_corpus, write_golden_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.preprocess import indexed_writer
from megatron_zpp.data.preprocess.corpus_builder import CorpusBuilder
from megatron_zpp.data.preprocess.indexed_writer import Extent, IndexedDatasetWriter, partial_paths, publish
from megatron_zpp.data.preprocess.journal import Journal, Progress
from megatron_zpp.system.user_error import UserError


def pair(prefix: str | Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def megatrons_pair(documents: list[list[list[int]]]) -> tuple[bytes, bytes]:
    """The bytes of .bin and .idx for uint16 documents of sequences, packed value by value as the format says."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    offsets = [0, *accumulate(2 * length for length in lengths)][: len(lengths)]
    starts = [0, *accumulate(map(len, documents))]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(starts))
    body = (
        struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *offsets) + struct.pack(f"<{len(starts)}q", *starts)
    )
    tokens = [token for sequence in sequences for token in sequence]
    return struct.pack(f"<{len(tokens)}H", *tokens), header + body


def test_writer_makes_megatrons_bytes(tmp_path: Path) -> None:
    prefix = write_golden_corpus(tmp_path)
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    golden = GOLDEN["dataset"]
    assert index[:34].hex() == golden["idx_first_34_bytes_hex"]
    assert (len(index), hashlib.sha256(index).hexdigest()) == (golden["idx_bytes"], golden["idx_sha256"])
    assert (len(tokens), hashlib.sha256(tokens).hexdigest()) == (golden["bin_bytes"], golden["bin_sha256"])


def test_writer_makes_the_same_bytes_in_small_index_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_writer, "INDEX_CHUNK_NUMEL", 3)
    prefix = write_golden_corpus(tmp_path)
    assert hashlib.sha256(Path(f"{prefix}.idx").read_bytes()).hexdigest() == GOLDEN["dataset"]["idx_sha256"]


def test_documents_added_in_one_piece_equal_documents_added_one_by_one(tmp_path: Path) -> None:
    prefix = str(tmp_path / "bulk")
    lengths = GOLDEN["dataset"]["doc_lengths"]
    with IndexedDatasetWriter(prefix, np.dtype("uint16")) as writer:
        writer.add_documents(np.arange(8), lengths[:2] + [2])
        writer.add_documents(np.arange(8, 15), [7])
        writer.finalize()
    assert [IndexedDataset(prefix).read(i).tolist() for i in range(4)] == [[0, 1, 2, 3, 4], [5], [6, 7], list(range(8, 15))]


def test_offsets_beyond_four_gigabytes_do_not_wrap(tmp_path: Path) -> None:
    with IndexedDatasetWriter(str(tmp_path / "large"), np.dtype("int32")) as writer:
        writer._length_file.write(struct.pack("<3i", 2**31 - 1, 2**31 - 1, 5))
        writer._length_file.flush()
        writer._extent = Extent(2**32 + 3, 3, 0)
        offsets = next(writer._index_blocks())
    assert offsets.tolist() == [0, 4 * (2**31 - 1), 8 * (2**31 - 1)]


documents_of_sequences = st.lists(st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=4), max_size=3), max_size=6)


@settings(max_examples=100)
@given(batches=st.lists(documents_of_sequences, max_size=4), chunk=st.integers(1, 5))
def test_any_documents_in_any_batches_give_the_bytes_of_the_format(batches: list[list[list[list[int]]]], chunk: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_writer, "INDEX_CHUNK_NUMEL", chunk)
        with IndexedDatasetWriter(f"{folder}/corpus", np.dtype("uint16")) as writer:
            for documents in batches:
                sequences = [sequence for document in documents for sequence in document]
                tokens = np.array([token for sequence in sequences for token in sequence], dtype=np.int64)
                # A document without sequences at the end of the corpus still has its own end.
                ends = list(accumulate(map(len, documents)))
                writer.add_sequences(tokens, list(map(len, sequences)), ends)
            writer.finalize()
        everything = [document for documents in batches for document in documents]
        assert pair(f"{folder}/corpus") == megatrons_pair(everything)
        dataset = IndexedDataset(f"{folder}/corpus")
        assert [dataset.read(i).tolist() for i in range(len(dataset))] == [s for d in everything for s in d]


def test_a_second_writer_goes_on_where_the_first_said_it_was(tmp_path: Path) -> None:
    expected = pair(write_corpus(tmp_path, [[1, 2], [3], [], [4, 5, 6]], name="whole"))
    first = IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype("uint16"))
    first.add_document([1, 2])
    first.add_document([3])
    said = first.extent
    first.add_document([7] * 1000)
    first.close()
    with IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype("uint16"), said) as second:
        second.add_document([])
        second.add_document([4, 5, 6])
        second.finalize()
    assert pair(tmp_path / "corpus") == expected


def test_partial_files_shorter_than_what_was_said_are_refused(tmp_path: Path) -> None:
    first = IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype("uint16"))
    first.add_document([1, 2])
    first.close()
    with pytest.raises(UserError, match=r"corpus\.bin\.partial has 4 bytes, 6 were written"):
        IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype("uint16"), Extent(3, 1, 1))


def try_to_write(prefix: str, answers: "multiprocessing.Queue[str]") -> None:
    try:
        IndexedDatasetWriter(prefix, np.dtype("uint16"))
        answers.put("wrote")
    except ValueError as error:
        answers.put(str(error))


def test_two_processes_cannot_write_one_prefix(tmp_path: Path) -> None:
    prefix = str(tmp_path / "corpus")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with IndexedDatasetWriter(prefix, np.dtype("uint16")) as writer:
        writer.add_document([1, 2])
        other = context.Process(target=try_to_write, args=(prefix, answers))
        other.start()
        assert "corpus.bin is being written by another process" in answers.get(timeout=PATIENCE_SECONDS)
        other.join()
        writer.finalize()
    assert IndexedDataset(prefix).read(0).tolist() == [1, 2]


def try_to_begin_anew(prefix: str, answers: "multiprocessing.Queue[str]") -> None:
    try:
        CorpusBuilder(Journal(prefix, [], {}), ["text"], np.dtype("uint16"), 30.0, None)
        answers.put("began")
    except ValueError as error:
        answers.put(str(error))


def test_a_process_that_is_refused_leaves_the_record_of_the_one_that_writes(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "corpus"), [], {})
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with IndexedDatasetWriter(f"{journal.prefix}_text_document", np.dtype("uint16")):
        journal.save(Progress())
        other = context.Process(target=try_to_begin_anew, args=(journal.prefix, answers))
        other.start()
        assert "is being written by another process" in answers.get(timeout=PATIENCE_SECONDS)
        other.join()
    assert journal.path.exists()


def test_a_file_that_got_its_name_before_the_lock_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = str(tmp_path / "corpus")
    Path(f"{prefix}.bin.partial").write_bytes(b"\1\0")
    monkeypatch.setattr(indexed_writer.fcntl, "lockf", lambda *_: Path(f"{prefix}.bin.partial").rename(f"{prefix}.bin"))
    with pytest.raises(UserError, match=r"corpus\.bin is being written by another process"):
        IndexedDatasetWriter(prefix, np.dtype("uint16"))
    assert Path(f"{prefix}.bin").read_bytes() == b"\1\0"


def test_publishing_goes_on_from_any_point_it_was_interrupted_at(tmp_path: Path) -> None:
    for renamed in range(3):
        prefix = write_corpus(tmp_path, [[9, 9, 9]], name=f"corpus{renamed}")
        writer = IndexedDatasetWriter(prefix, np.dtype("uint16"))
        writer.add_document([1, 2])
        writer.complete()
        if renamed > 0:
            Path(f"{prefix}.idx").unlink()
            Path(f"{prefix}.bin.partial").rename(f"{prefix}.bin")
        if renamed > 1:
            Path(f"{prefix}.idx.partial").rename(f"{prefix}.idx")
        publish(prefix)
        publish(prefix)
        assert IndexedDataset(prefix).read(0).tolist() == [1, 2]
        assert not any(Path(path).exists() for path in partial_paths(prefix))


def names_after_a_loss_of_power(changes: list[tuple[str, ...] | None], before: dict[str, str]) -> Iterator[dict[str, str]]:
    """What each name may stand for if power is lost at any moment of these changes: any of those since the last sync (None) may be undone.

    changes: the name that is removed, or the old and the new name. before: what each name stands for at first.
    """
    for end in range(len(changes) + 1):
        synced = max((place for place in range(end) if changes[place] is None), default=0)
        for kept in product((False, True), repeat=end - synced):
            names = dict(before)
            for change, is_kept in zip(changes[:end], [True] * synced + list(kept), strict=True):
                if change is not None and is_kept and change[0] in names:
                    content = names.pop(change[0])
                    names.update(dict.fromkeys(change[1:], content))
            yield names


def test_a_loss_of_power_leaves_no_index_beside_the_tokens_of_another_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_corpus(tmp_path, [[9, 9, 9]])
    writer = IndexedDatasetWriter(prefix, np.dtype("uint16"))
    writer.add_document([1, 2])
    writer.complete()
    changes: list[tuple[str, ...] | None] = []

    def noted(change: Callable[..., None]) -> Callable[..., None]:
        return lambda *paths: (changes.append(paths), change(*paths))[1]

    for name in ("remove", "replace"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    monkeypatch.setattr(indexed_writer, "sync_folder", lambda folder: changes.append(None))
    publish(prefix)
    before = {f"{prefix}.{kind}": "old" for kind in ("bin", "idx")} | dict.fromkeys(partial_paths(prefix), "new")
    found = {(names.get(f"{prefix}.bin"), names.get(f"{prefix}.idx")) for names in names_after_a_loss_of_power(changes, before)}
    assert found == {("old", "old"), ("old", None), ("new", None), ("new", "new")}
    writer.close()


def test_a_document_longer_than_a_length_can_say_is_refused(tmp_path: Path) -> None:
    # The check comes before any access to the array.
    tokens = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (2**31,), (0,))
    with IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype("uint16")) as writer, pytest.raises(UserError, match="2147483648 tokens"):
        writer.add_document(tokens)


def test_one_corpus_is_appended_to_another_with_its_documents(tmp_path: Path) -> None:
    expected = pair(write_corpus(tmp_path, [[1], [], [2, 3], [4]], name="whole"))
    parts = [write_corpus(tmp_path, documents, name=f"part{i}") for i, documents in enumerate(([[1], []], [[2, 3], [4]]))]
    with IndexedDatasetWriter(str(tmp_path / "merged"), np.dtype("uint16")) as writer:
        for part in parts:
            writer.add_dataset(IndexedDataset(part))
        with pytest.raises(UserError, match="holds int32, but uint16 is needed"):
            writer.add_dataset(IndexedDataset(write_corpus(tmp_path, [[1]], "int32", name="other")))
        writer.finalize()
    assert pair(tmp_path / "merged") == expected


def test_an_interrupted_writer_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype("uint16")) as writer:
        writer.add_document([1, 2, 3])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_leaves_the_old_corpus_as_it_was(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[7, 8]])
    with IndexedDatasetWriter(prefix, np.dtype("uint16")) as writer:
        writer.add_document([1, 2, 3])
    assert IndexedDataset(prefix).read(0).tolist() == [7, 8]


def test_writer_refuses_ids_its_dtype_cannot_hold(tmp_path: Path) -> None:
    with IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype("uint16")) as writer:
        with pytest.raises(UserError, match="uint16 and cannot hold the token ids 3 to 65536.*--vocab-size"):
            writer.add_document([3, 65536])
        with pytest.raises(UserError, match="-1 to 0"):
            writer.add_document([-1, 0])


def test_writer_refuses_floating_point(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot hold float32"):
        IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype("float32"))


class FullDisk(io.FileIO):
    """A file that takes nothing any more."""

    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("numel", [1, 100_000])
def test_on_a_full_disk_the_error_names_the_corpus_and_no_partial_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numel: int
) -> None:
    def opened(path: str, needed_bytes: int) -> BinaryIO:
        return io.BufferedRandom(FullDisk(indexed_writer.kept_file(f"{path}.partial"), "r+b"))

    monkeypatch.setattr(indexed_writer, "open_partial", opened)
    with (
        pytest.raises(OSError, match="No space left") as error,
        IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype(np.uint16)) as writer,
    ):
        writer.add_document(np.zeros(numel, np.uint16))
        writer.finalize()
    assert error.value.filename == str(tmp_path / "corpus.bin")
    assert list(tmp_path.iterdir()) == []
