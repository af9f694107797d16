import numpy as np
import pytest
from harness.tiny_corpus import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.data_sources import SPLITS
from megatron_zpp.data.epochs import plan_epochs
from megatron_zpp.data.gpt_indices import build_gpt_indices, needed_bytes
from megatron_zpp.data.split import split_documents

CASES = [(case, name) for case in ("one_epoch", "three_splits") for name in SPLITS if GOLDEN[case][name] is not None]

corpora = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)


@pytest.mark.parametrize(("case", "name"), CASES)
def test_indices_equal_megatrons(case: str, name: str) -> None:
    lengths = np.array(GOLDEN["dataset"]["doc_lengths"], dtype=np.int32)
    indices = build_gpt_indices(
        lengths,
        split_documents(GOLDEN[case]["split"], len(lengths))[name],
        sample_count=GOLDEN[case]["sample_counts"][SPLITS.index(name)],
        seq_length=GOLDEN["dataset"]["seq_length"],
        seed=GOLDEN["dataset"]["seed"],
    )
    golden = GOLDEN[case][name]
    assert indices.document.tolist() == golden["doc_idx"]
    assert indices.sample.tolist() == golden["sample_idx"]
    assert indices.shuffle.tolist() == golden["shuffle_idx"]
    assert [values.dtype.name for values in indices] == golden["dtypes"]


@given(lengths=corpora, sample_count=st.integers(0, 40), seq_length=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_samples_cut_the_shuffled_stream_every_seq_length_tokens(lengths: list[int], sample_count: int, seq_length: int, seed: int) -> None:
    indices = build_gpt_indices(
        np.array(lengths, dtype=np.int32), range(len(lengths)), sample_count=sample_count, seq_length=seq_length, seed=seed
    )
    stream = [(position, offset) for position, document in enumerate(indices.document) for offset in range(lengths[document])]
    samples = (len(stream) - 1) // seq_length
    assert samples >= sample_count
    assert [tuple(row) for row in indices.sample.tolist()] == [(0, 0)] + [stream[i * seq_length] for i in range(1, samples + 1)]
    assert sorted(indices.shuffle.tolist()) == list(range(samples))
    epochs = len(indices.document) // len(lengths)
    assert sorted(indices.document.tolist()) == sorted(list(range(len(lengths))) * epochs)
    assert epochs == 1 or (epochs - 1) * sum(lengths) < sample_count * seq_length + 1


@given(tokens=st.integers(1, 60), sample_count=st.integers(0, 60), seq_length=st.integers(1, 9))
def test_last_epoch_stands_apart_if_less_than_four_fifths_of_its_samples_are_needed(
    tokens: int, sample_count: int, seq_length: int
) -> None:
    repeats = 1
    while repeats * tokens < sample_count * seq_length + 1:
        repeats += 1
    before = ((repeats - 1) * tokens - 1) // seq_length
    apart = repeats > 1 and sample_count - before < int(0.80 * ((tokens - 1) // seq_length))
    expected = (repeats, (repeats * tokens - 1) // seq_length, before if apart else None)
    assert plan_epochs(tokens, sample_count=sample_count, seq_length=seq_length) == expected


@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=8), sample_count=st.integers(1, 60), seed=st.integers(0, 99))
def test_a_separate_last_epoch_comes_last_and_is_whole(lengths: list[int], sample_count: int, seed: int) -> None:
    indices = build_gpt_indices(np.array(lengths, dtype=np.int32), range(len(lengths)), sample_count=sample_count, seq_length=3, seed=seed)
    first = plan_epochs(sum(lengths), sample_count=sample_count, seq_length=3).shuffled_apart_from
    if first is not None:
        assert sorted(indices.document[-len(lengths) :].tolist()) == list(range(len(lengths)))
        assert sorted(indices.shuffle[:first].tolist()) == list(range(first))


def test_a_stream_beyond_32_bits_is_cut_exactly() -> None:
    longest, seq_length = 2**31 - 1, 10**9
    indices = build_gpt_indices(np.array([longest] * 5, dtype=np.int32), range(5), sample_count=20, seq_length=seq_length, seed=1)
    assert indices.sample.dtype == np.int64
    assert indices.sample.tolist() == [list(divmod(i * seq_length, longest)) for i in range(len(indices.sample))]
    assert len(indices.shuffle) == (len(indices.document) * longest - 1) // seq_length >= 20


def test_documents_without_tokens_are_refused() -> None:
    with pytest.raises(RuntimeError, match="documents 1 to 2 hold no token"):
        build_gpt_indices(np.array([5, 0], dtype=np.int32), range(1, 2), sample_count=1, seq_length=4, seed=1)


def test_the_memory_that_is_checked_before_building_is_that_of_the_arrays() -> None:
    lengths = np.full(10, 100, np.int32)
    for sample_count in (1, 100, 5000):
        indices = build_gpt_indices(lengths, range(10), sample_count=sample_count, seq_length=8, seed=1)
        epochs = plan_epochs(1000, sample_count=sample_count, seq_length=8)
        assert needed_bytes(epochs, 10) == sum(values.nbytes for values in indices) - 8  # the end of the last sample
