import hashlib
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.blended_dataset import BlendIndices, build_blend_indices
from megatron_zpp.data.gpt_indices import GPTIndices
from megatron_zpp.data.index_cache import MAPPED_FROM_BYTES, CachedIndices, IndexCache

DESCRIPTION = {"class": "GPTDataset", "num_samples": 3}


def some_indices(first: int = 5) -> GPTIndices:
    return GPTIndices(np.array([first], np.int32), np.array([[0, 0], [0, 4]], np.int32), np.array([0], np.uint32))


def must_not_build() -> GPTIndices:
    raise AssertionError("built although the indices lie in the cache")


def assert_equal(found: GPTIndices, expected: GPTIndices) -> None:
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        assert left.tolist() == right.tolist()


def build_slowly_and_count(folder: Path) -> None:
    def build() -> GPTIndices:
        with open(folder / "builds", "a") as file:
            file.write("x")
        time.sleep(0.3)
        return some_indices()

    assert_equal(IndexCache(GPTIndices, folder / "cache", "train", DESCRIPTION).load_or_build(build).indices, some_indices())


def test_second_call_loads_what_the_first_one_built(tmp_path: Path) -> None:
    cache = IndexCache(GPTIndices, tmp_path / "new" / "folder", "train", DESCRIPTION)
    assert cache.load_or_build(some_indices).message is None
    assert_equal(cache.load_or_build(must_not_build).indices, some_indices())


def test_files_have_megatrons_names_and_nothing_temporary_remains(tmp_path: Path) -> None:
    IndexCache(GPTIndices, tmp_path, "valid", DESCRIPTION).load_or_build(some_indices)
    stem = hashlib.md5(json.dumps(DESCRIPTION, indent=4).encode()).hexdigest() + "-GPTDataset-valid"
    endings = ["-description.txt", "-document_index.npy", "-sample_index.npy", "-shuffle_index.npy", ".lock"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [stem + ending for ending in endings]
    assert json.loads((tmp_path / f"{stem}-description.txt").read_text()) == DESCRIPTION


def test_another_description_has_other_files(tmp_path: Path) -> None:
    IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION).load_or_build(some_indices)
    other = IndexCache(GPTIndices, tmp_path, "train", {**DESCRIPTION, "num_samples": 4}).load_or_build(lambda: some_indices(9))
    assert_equal(other.indices, some_indices(9))


@pytest.mark.parametrize("ending", ["-description.txt", "-document_index.npy", "-sample_index.npy", "-shuffle_index.npy"])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, ending: str, damage: str) -> None:
    cache = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION)
    cache.load_or_build(some_indices)
    path = tmp_path / f"{cache.stem}{ending}"
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(b"" if damage == "empty" else content[:-1])
    assert_equal(cache.load_or_build(some_indices).indices, some_indices())
    assert path.read_bytes() == content


def test_a_builder_that_dies_leaves_no_half_cache(tmp_path: Path) -> None:
    def fail() -> GPTIndices:
        raise MemoryError

    cache = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION)
    with pytest.raises(MemoryError):
        cache.load_or_build(fail)
    assert (tmp_path / f"{cache.stem}.error").exists()
    assert_equal(cache.load_or_build(some_indices).indices, some_indices())
    assert not (tmp_path / f"{cache.stem}.error").exists()


def test_small_arrays_are_read_and_large_ones_mapped(tmp_path: Path) -> None:
    large = np.arange(MAPPED_FROM_BYTES, dtype=np.int32)
    cache = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION)
    cache.load_or_build(lambda: some_indices()._replace(document=large))
    loaded = cache.load_or_build(must_not_build).indices
    assert np.array_equal(loaded.document, large)
    assert isinstance(loaded.document.base, np.memmap) and not isinstance(loaded.sample.base, np.memmap)


def test_blends_have_files_of_their_own(tmp_path: Path) -> None:
    cache = IndexCache(BlendIndices, tmp_path, "train", {"class": "BlendedDataset"})
    built = cache.load_or_build(lambda: build_blend_indices([0.5, 0.5], 4)).indices
    loaded = cache.load_or_build(lambda: build_blend_indices([1.0], 1)).indices
    assert [values.tolist() for values in loaded] == [values.tolist() for values in built] == [[0, 1, 0, 1], [0, 0, 1, 1], [2, 2]]
    assert (tmp_path / f"{cache.stem}-dataset_index.npy").exists() and "BlendedDataset-train" in cache.stem


def test_processes_that_come_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=build_slowly_and_count, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def unwritable(folder: Path) -> Path:
    # A folder below a file cannot be made by anyone, root included.
    (folder / "file").touch()
    return folder / "file" / "cache"


def test_an_unwritable_folder_means_indices_in_memory_and_one_line(tmp_path: Path) -> None:
    cached: CachedIndices[GPTIndices] = IndexCache(GPTIndices, unwritable(tmp_path), "train", DESCRIPTION).load_or_build(some_indices)
    assert_equal(cached.indices, some_indices())
    assert cached.message is not None
    assert "built in memory" in cached.message
    assert "--data-cache-path" in cached.message
    assert "\n" not in cached.message


def test_a_disk_that_fills_up_means_indices_in_memory_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    cached = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION).load_or_build(some_indices)
    assert_equal(cached.indices, some_indices())
    assert cached.message is not None
    assert "No space left on device" in cached.message
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
