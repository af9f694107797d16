import hashlib
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from harness.patience import PATIENCE_SECONDS

from megatron_zpp.data import stored_array
from megatron_zpp.data.blended_dataset import BlendIndices, build_blend_indices
from megatron_zpp.data.build_once import ProgressPrinter
from megatron_zpp.data.gpt_indices import GPTIndices
from megatron_zpp.data.index_cache import CachedIndices, IndexCache, load_array
from megatron_zpp.data.stored_array import StoredArray
from megatron_zpp.system.user_error import UserError

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
    endings = ["-checksums.json", "-description.txt", "-document_index.npy", "-sample_index.npy", "-shuffle_index.npy", ".lock"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [stem + ending for ending in endings]
    assert json.loads((tmp_path / f"{stem}-description.txt").read_text()) == DESCRIPTION


def test_another_description_has_other_files(tmp_path: Path) -> None:
    IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION).load_or_build(some_indices)
    other = IndexCache(GPTIndices, tmp_path, "train", {**DESCRIPTION, "num_samples": 4}).load_or_build(lambda: some_indices(9))
    assert_equal(other.indices, some_indices(9))


@pytest.mark.parametrize(
    "ending", ["-checksums.json", "-description.txt", "-document_index.npy", "-sample_index.npy", "-shuffle_index.npy"]
)
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


def with_lines() -> tuple[ProgressPrinter, list[str]]:
    lines: list[str] = []
    return ProgressPrinter("rank 0", lines.append), lines


@pytest.mark.parametrize("held_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", ["document", "sample", "shuffle"])
def test_a_changed_byte_anywhere_in_an_array_is_found_and_said_in_one_line(
    tmp_path: Path, name: str, held_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_array, "HELD_BELOW_BYTES", held_bytes)

    def build() -> GPTIndices:
        values = np.arange(300, dtype=np.int32)
        return GPTIndices(values, np.stack([values, values], axis=1), values)

    cache = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION)
    cache.load_or_build(build)
    path = tmp_path / f"{cache.stem}-{name}_index.npy"
    content = path.read_bytes()
    for place in (20, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        printer, lines = with_lines()
        assert_equal(cache.load_or_build(build, "the indices", printer).indices, build())
        assert lines == [f"{path} does not have its checksum: rank 0 builds the indices again"]
        assert path.read_bytes() == content
    path.write_bytes(content[:-4] + b"\0" * 4)
    zeroed = cache.load_or_build(build).indices
    assert_equal(zeroed, build())


def test_a_cache_without_checksums_is_built_again_once(tmp_path: Path) -> None:
    cache = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION)
    cache.load_or_build(some_indices)
    checksums = tmp_path / f"{cache.stem}-checksums.json"
    checksums.unlink()
    printer, lines = with_lines()
    cache.load_or_build(some_indices, "the indices", printer)
    assert lines == [f"{checksums} cannot be read (No such file or directory): rank 0 builds the indices again"]
    assert_equal(cache.load_or_build(must_not_build, "the indices", printer).indices, some_indices())
    assert len(lines) == 1


@pytest.mark.parametrize("ending", ["-checksums.json", "-description.txt", "-sample_index.npy", ".lock", ".error"])
def test_a_pipe_in_the_place_of_a_file_hangs_nobody(tmp_path: Path, ending: str) -> None:
    cache = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION)
    cache.load_or_build(some_indices)
    (tmp_path / f"{cache.stem}{ending}").unlink(missing_ok=True)
    os.mkfifo(tmp_path / f"{cache.stem}{ending}")
    if ending in (".lock", ".error"):
        (tmp_path / f"{cache.stem}-description.txt").unlink()
    found = cache.load_or_build(some_indices)
    assert_equal(found.indices, some_indices())
    assert (found.message is not None) == (ending == ".lock")


def test_a_link_in_the_place_of_the_lock_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    cache = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION)
    (tmp_path / f"{cache.stem}.lock").symlink_to(tmp_path / "victim")
    found = cache.load_or_build(some_indices)
    assert found.message is not None and "it is a symbolic link" in found.message
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_builder_that_dies_leaves_no_half_cache(tmp_path: Path) -> None:
    def fail() -> GPTIndices:
        raise MemoryError

    cache = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION)
    with pytest.raises(MemoryError):
        cache.load_or_build(fail)
    assert (tmp_path / f"{cache.stem}.error").exists()
    assert_equal(cache.load_or_build(some_indices).indices, some_indices())
    assert not (tmp_path / f"{cache.stem}.error").exists()


def test_small_arrays_are_held_and_of_large_ones_the_rows_in_use_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_array, "HELD_BELOW_BYTES", 1000)
    large = np.arange(600, dtype=np.int32)
    cache = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION)
    cache.load_or_build(lambda: some_indices()._replace(document=large, sample=large.reshape(-1, 2)))
    loaded = cache.load_or_build(must_not_build).indices
    assert isinstance(loaded.document, StoredArray) and isinstance(loaded.sample, StoredArray) and isinstance(loaded.shuffle, np.ndarray)
    assert np.array_equal(loaded.document, large)
    assert (loaded.document[-1], loaded.document[7:9].tolist(), len(loaded.document)) == (599, [7, 8], 600)
    assert (loaded.sample[299].tolist(), loaded.sample[5:7].tolist(), len(loaded.sample)) == ([598, 599], [[10, 11], [12, 13]], 300)


def test_a_cached_array_that_is_cut_off_while_it_is_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_array, "HELD_BELOW_BYTES", 0)
    cache = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION)
    cache.load_or_build(some_indices)
    loaded = cache.load_or_build(must_not_build).indices
    path = tmp_path / f"{cache.stem}-sample_index.npy"
    whole = path.stat().st_size
    os.truncate(path, whole - 8)
    assert loaded.sample[0].tolist() == [0, 0]
    with pytest.raises(
        ValueError, match=f"^{path} was cut off while it was in use: it had {whole} bytes, it has {whole - 8}; start the run"
    ):
        loaded.sample[1]


@pytest.mark.parametrize("values", [np.zeros((2, 3), order="F"), np.array(3), np.array([None])])
def test_a_file_that_does_not_hold_rows_of_numbers_is_not_loaded(tmp_path: Path, values: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", values, allow_pickle=True)
    with pytest.raises(UserError, match="a.npy does not hold rows of numbers"):
        load_array(tmp_path / "a.npy")


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
        process.join(PATIENCE_SECONDS)
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


def test_a_disk_without_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20))
    monkeypatch.setattr(np, "save", lambda *_, **options: pytest.fail("an array was written"))
    cached = IndexCache(GPTIndices, tmp_path, "train", DESCRIPTION).load_or_build(some_indices)
    assert cached.message is not None and "No space left on device" in cached.message
