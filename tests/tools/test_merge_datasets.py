import shutil
from pathlib import Path

import pytest
from harness.tiny_corpus import write_corpus
from harness.tool import run_tool

from megatron_zpp.data.indexed_dataset import IndexedDataset

PARTS = ([[1], [2, 3]], [[], [4]], [[5, 6]])


def pair(prefix: str | Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_a_folder_is_merged_in_the_order_of_names_to_the_bytes_of_one_corpus(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for number, documents in enumerate(PARTS):
        write_corpus(tmp_path / "parts", documents, name=f"part_{number}")
    expected = pair(write_corpus(tmp_path, [document for documents in PARTS for document in documents], name="whole"))
    done = run_tool("merge_datasets", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "new" / "merged")
    assert done.returncode == 0, done.stderr
    assert pair(tmp_path / "new" / "merged") == expected
    assert f"{tmp_path}/new/merged: 5 documents, 6 tokens of 3 corpora" in done.stdout


def test_named_corpora_are_merged_in_the_order_of_their_names_on_the_command_line(tmp_path: Path) -> None:
    first, second = (write_corpus(tmp_path, documents, name=f"part{number}") for number, documents in enumerate(PARTS[:2]))
    assert run_tool("merge_datasets", "--input", second, f"{first}.idx", "--output-prefix", tmp_path / "merged").returncode == 0
    dataset = IndexedDataset(str(tmp_path / "merged"))
    assert [dataset.read(i).tolist() for i in range(len(dataset))] == [[], [4], [1], [2, 3]]


@pytest.mark.parametrize("case", ["dtype", "half", "output", "twice", "spelled", "empty", "damaged", "multimodal"])
def test_what_cannot_be_merged_is_refused_and_nothing_is_written(tmp_path: Path, case: str) -> None:
    words: list[object] = ["--input", tmp_path, "--output-prefix", tmp_path / "out" / "merged"]
    write_corpus(tmp_path, [[1]], name="a")
    write_corpus(tmp_path, [[1]], "int32" if case == "dtype" else "uint16", name="b")
    if case == "dtype":
        message = f"{tmp_path}/b.bin holds int32, {tmp_path}/a.bin uint16"
    elif case == "half":
        (tmp_path / "a.idx").unlink()
        message = f"{tmp_path}/a.idx does not exist, but its other half does"
    elif case == "output":
        words[-1] = tmp_path / "b"
        message = f"--output-prefix {tmp_path}/b is one of the corpora to merge"
    elif case == "twice":
        words.insert(2, tmp_path / "a")
        message = f"--input names {tmp_path}/a twice"
    elif case == "spelled":
        (tmp_path / "there").symlink_to(tmp_path, target_is_directory=True)
        words.insert(2, tmp_path / "there" / "a.bin")
        message = f"--input names {tmp_path}/there/a twice (as {tmp_path}/a before); name it once"
    elif case == "empty":
        words[1] = shutil.copytree(tmp_path, tmp_path / "none", ignore=lambda *_: ["a.bin", "a.idx", "b.bin", "b.idx"])
        message = "has no pair of .bin and .idx"
    elif case == "damaged":
        (tmp_path / "b.bin").write_bytes(b"")
        message = "b.bin is truncated"
    else:
        words.append("--multimodal")
        message = "--multimodal is not available"
    done = run_tool("merge_datasets", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()
