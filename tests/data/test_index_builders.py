from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from harness.tiny_corpus import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data import index_builders
from megatron_zpp.data.gpt_indices import GPTIndices, build_gpt_indices
from megatron_zpp.data.index_builders import cut_samples, deal_samples
from megatron_zpp.ops import extension

needs_kernels = pytest.mark.skipif(not extension.load(), reason="the kernels are not built: bash scripts/build_extensions.sh")

# Empty documents, one-token documents, and lengths around powers of two.
document_lengths = st.one_of(st.sampled_from([0, 0, 1, 1]), st.integers(0, 12), st.sampled_from([15, 16, 17, 31, 32, 33, 127, 128, 129]))
corpora = st.lists(document_lengths, min_size=1, max_size=20).filter(any)
sizes_around_powers_of_two = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65])


@contextmanager
def numpy_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_builders, "uses_kernels", lambda: False)
        yield


def assert_same(left: GPTIndices, right: GPTIndices) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


@needs_kernels
@settings(max_examples=300)
@given(
    lengths=corpora, seq_length=sizes_around_powers_of_two, epochs=st.integers(1, 5), part=st.floats(0, 1), seed=st.integers(0, 2**32 - 1)
)
def test_cpp_and_numpy_build_the_same_indices(lengths: list[int], seq_length: int, epochs: int, part: float, seed: int) -> None:
    sample_count = int((epochs - 1 + part) * sum(lengths)) // seq_length
    array = np.array(lengths, dtype=np.int32)
    built = build_gpt_indices(array, range(len(lengths)), sample_count=sample_count, seq_length=seq_length, seed=seed)
    with numpy_alone():
        assert_same(built, build_gpt_indices(array, range(len(lengths)), sample_count=sample_count, seq_length=seq_length, seed=seed))


@needs_kernels
def test_cpp_and_numpy_agree_where_numpy_works_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_builders, "NUMPY_ROWS", 7)
    lengths = np.random.RandomState(3).randint(0, 9, 200).astype(np.int32)
    built = build_gpt_indices(lengths, range(200), sample_count=500, seq_length=4, seed=5)
    with numpy_alone():
        assert_same(built, build_gpt_indices(lengths, range(200), sample_count=500, seq_length=4, seed=5))


@pytest.mark.parametrize("builder", ["C++", "numpy"])
def test_lengths_may_lie_unaligned_and_read_only_as_in_a_mapped_file(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if builder == "numpy":
        monkeypatch.setattr(index_builders, "uses_kernels", lambda: False)
    lengths = np.frombuffer(b"??" + np.array([3, 0, 4], dtype="<i4").tobytes(), "<i4", 3, 2)
    assert cut_samples(lengths, np.array([2, 1, 0], dtype=np.int32), sample_count=3, seq_length=2).tolist() == [
        [0, 0],
        [0, 2],
        [2, 0],
        [2, 2],
    ]


@pytest.mark.parametrize("builder", ["C++", "numpy"])
def test_a_stream_that_ends_too_early_is_a_broken_invariant(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if builder == "numpy":
        monkeypatch.setattr(index_builders, "uses_kernels", lambda: False)
    with pytest.raises(RuntimeError, match="the stream of 5 tokens ends before sample 3 starts"):
        cut_samples(np.array([5], dtype=np.int32), np.array([0], dtype=np.int32), sample_count=3, seq_length=2)


@needs_kernels
def test_cpp_refuses_documents_that_are_not_there() -> None:
    for document in (-1, 1):
        with pytest.raises(RuntimeError, match=f"document_index holds {document}, there are 1 documents"):
            cut_samples(np.array([5], dtype=np.int32), np.array([document], dtype=np.int32), sample_count=1, seq_length=2)


@needs_kernels
def test_cpp_refuses_other_dtypes_and_shapes() -> None:
    ops = torch.ops.megatron_zpp
    lengths, documents = torch.ones(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="int32 or int64"):
        ops.build_sample_index(lengths, documents, 1, torch.zeros(2, 2, dtype=torch.int16))
    with pytest.raises(RuntimeError):
        ops.build_sample_index(lengths.long(), documents, 1, torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="sample_index must have rows of 2 values, not 3"):
        ops.build_sample_index(lengths, documents, 1, torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="do not fit"):
        ops.build_blend_index(torch.ones(40_000, dtype=torch.float64), torch.zeros(1, dtype=torch.int16), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="differ in length"):
        ops.build_blend_index(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int16), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("builder", ["C++", "numpy"])
def test_the_blend_equals_megatrons(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if builder == "numpy":
        monkeypatch.setattr(index_builders, "uses_kernels", lambda: False)
    golden = GOLDEN["blend"]
    dataset_index, dataset_sample = deal_samples(np.array(golden["weights"]), golden["size"])
    assert dataset_index.tolist() == golden["dataset_index"]
    assert dataset_sample.tolist() == golden["dataset_sample_index"]
    assert (dataset_index.dtype, dataset_sample.dtype) == (np.int16, np.int64)


@needs_kernels
@given(parts=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), size=st.integers(0, 200))
def test_cpp_and_numpy_deal_the_same_blend_which_stays_within_one_sample_of_its_shares(parts: list[float], size: int) -> None:
    weights = np.array(parts) / np.sum(parts)
    dealt = deal_samples(weights, size)
    with numpy_alone():
        for one, other in zip(dealt, deal_samples(weights, size), strict=True):
            assert np.array_equal(one, other)
    drawn = np.bincount(dealt[0], minlength=len(parts))
    # The dataset furthest behind is drawn, so none is ahead by more than the sample just taken, however many datasets there are.
    assert (drawn - weights * size <= 1 + 1e-9).all()
    for dataset in range(len(parts)):
        assert dealt[1][dealt[0] == dataset].tolist() == list(range(drawn[dataset]))


@pytest.mark.parametrize("builder", ["C++", "numpy"])
@pytest.mark.parametrize(("datasets", "dtype"), [(256, "int16"), (32_767, "int16"), (32_768, "int32"), (40_000, "int32")])
def test_a_blend_has_room_for_any_number_of_datasets(builder: str, datasets: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if builder == "numpy":
        monkeypatch.setattr(index_builders, "uses_kernels", lambda: False)
    weights = np.full(datasets, 1e-9)
    weights[-1] = 1.0
    dataset_index, _ = deal_samples(weights / weights.sum(), 3)
    # The dataset with the first sample is then ahead, so the second sample goes to the first of the others.
    assert (dataset_index.dtype.name, dataset_index.tolist()) == (dtype, [datasets - 1, 0, datasets - 1])
