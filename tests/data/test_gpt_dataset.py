import os
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from harness.tiny_corpus import GOLDEN, counting_documents, open_dataset, write_corpus, write_golden_corpus
from torch.utils.data import _utils

from megatron_zpp.config.data_sources import SPLITS
from megatron_zpp.data import stored_array
from megatron_zpp.data.build_once import SILENT
from megatron_zpp.data.corpus import Corpus, SampleOrder
from megatron_zpp.data.documents import DocumentRules
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.sampler import MicroBatchSampler
from megatron_zpp.data.split import split_documents
from megatron_zpp.system.user_error import UserError

_utils.MP_STATUS_CHECK_INTERVAL = 0.1  # seconds for which a loader waits for the end of a worker that has raised

CASES = [(case, name) for case in ("one_epoch", "three_splits") for name in SPLITS if GOLDEN[case][name] is not None]


@pytest.mark.parametrize(("case", "name"), CASES)
def test_first_sample_equals_megatrons(tmp_path: Path, case: str, name: str) -> None:
    documents = split_documents(GOLDEN[case]["split"], 10)[name]
    dataset = open_dataset(write_golden_corpus(tmp_path), documents, sample_count=GOLDEN[case]["sample_counts"][SPLITS.index(name)])
    golden = GOLDEN[case][name]
    assert len(dataset) == golden["length"]
    assert dataset[0]["tokens"].tolist() == golden["first"]
    assert dataset[0]["labels"].tolist() == golden["first_labels"]


def test_samples_of_all_indices_are_the_shuffled_stream(tmp_path: Path) -> None:
    lengths = [3, 0, 7, 1, 1, 0, 12]
    documents = counting_documents(lengths)
    dataset = open_dataset(write_corpus(tmp_path, documents), range(7), sample_count=9, seq_length=5)
    stream = [token for document in dataset.indices.document for token in documents[document]]
    for index, sample in enumerate(dataset.indices.shuffle.tolist()):
        assert dataset[index]["tokens"].tolist() == stream[sample * 5 : sample * 5 + 5]
        assert dataset[index]["labels"].tolist() == stream[sample * 5 + 1 : sample * 5 + 6]


def test_samples_are_64_bit_ids_with_every_position_in_the_loss(tmp_path: Path) -> None:
    sample = open_dataset(write_golden_corpus(tmp_path), range(10), sample_count=1)[0]
    assert (sample["tokens"].dtype, sample["labels"].dtype, sample["loss_mask"].dtype) == (np.int64, np.int64, np.float32)
    assert sample["loss_mask"].tolist() == [1.0] * 8


@pytest.mark.parametrize("index", [-1, 9])
def test_an_index_outside_of_the_dataset_is_refused(tmp_path: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"sample {index} of 9"):
        open_dataset(write_golden_corpus(tmp_path), range(10), sample_count=8)[index]


def test_pickled_dataset_gives_the_same_samples(tmp_path: Path) -> None:
    dataset = open_dataset(write_golden_corpus(tmp_path), range(10), sample_count=8)
    assert pickle.loads(pickle.dumps(dataset))[4]["tokens"].tolist() == dataset[4]["tokens"].tolist()


def test_a_corpus_cut_off_while_it_is_in_use_is_named_and_one_replaced_or_removed_is_read_on(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[7] * 4096] * 8)
    dataset = open_dataset(prefix, range(8), sample_count=4, seq_length=64, seed=1)
    whole = Path(f"{prefix}.bin").read_bytes()
    (tmp_path / "other").write_bytes(b"")
    os.replace(f"{prefix}.bin", tmp_path / "moved")
    os.replace(tmp_path / "other", f"{prefix}.bin")
    assert dataset[0]["tokens"].tolist() == [7] * 64
    os.remove(f"{prefix}.bin")
    assert dataset[1]["tokens"].tolist() == [7] * 64
    os.truncate(tmp_path / "moved", 64)
    with pytest.raises(UserError, match=f"^{prefix}.bin was cut off while it was in use: it had {len(whole)} bytes, it has 64; copy it"):
        dataset[0]


def first_error(prefix: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of reading micro-batches after the .bin has been cut off to one page."""
    monkeypatch.setattr(stored_array, "HELD_BELOW_BYTES", 0)
    dataset = open_dataset(prefix, range(8), sample_count=4, seq_length=64)
    rules = DocumentRules(eod=0, resets_positions=False, resets_attention=False, masks_loss=False)
    os.truncate(f"{prefix}.bin", 4096)
    try:
        list(islice(MicroBatches(dataset, MicroBatchSampler(len(dataset), 0, 8, 0, 1), workers, rules), 8))
    except ValueError as error:  # pytest.raises would keep the traceback, and with it the workers
        return str(error)
    return "no error"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corpus_cut_off_between_a_check_and_a_read_is_named_instead_of_killing_the_process(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A check of the size finds the whole file. A memory map would end the process by SIGBUS.
    prefix = write_corpus(tmp_path, [[7] * 4096] * 8)
    with monkeypatch.context() as patched:
        status = os.stat(f"{prefix}.bin")
        patched.setattr(os, "stat", lambda path, **options: status)
        assert f"{prefix}.bin was cut off while it was in use: it had 65536 bytes, it has 4096; copy it again" in first_error(
            prefix, workers, monkeypatch
        )


def test_an_index_cut_off_while_it_is_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_array, "HELD_BELOW_BYTES", 0)
    prefix = write_golden_corpus(tmp_path)
    source = IndexedDataset(prefix)
    os.truncate(f"{prefix}.idx", 100)
    with pytest.raises(UserError, match=f"^{prefix}.idx was cut off while it was in use: it had 242 bytes, it has 100; copy it again"):
        source.read(9)


@pytest.mark.parametrize("held_bytes", [0, 1 << 20])
def test_samples_are_the_same_whether_arrays_are_held_or_read(tmp_path: Path, held_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_array, "HELD_BELOW_BYTES", held_bytes)
    documents = counting_documents([3, 0, 7, 1, 1, 0, 12])
    order = SampleOrder(5, 1, tmp_path / "cache")
    prefix = write_corpus(tmp_path, documents)
    Corpus(prefix, None, order).dataset("train", 9, SILENT, [])
    dataset = Corpus(prefix, None, order).dataset("train", 9, SILENT, [])  # from the cache
    stream = [token for document in dataset.indices.document.tolist() for token in documents[document]]
    for index, sample in enumerate(dataset.indices.shuffle.tolist()):
        assert dataset[index]["tokens"].tolist() == stream[sample * 5 : sample * 5 + 5]
    assert pickle.loads(pickle.dumps(dataset))[4]["labels"].tolist() == dataset[4]["labels"].tolist()
