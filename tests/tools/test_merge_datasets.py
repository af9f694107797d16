import shutil
import subprocess
from pathlib import Path

import pytest
from harness.tiny_corpus import write_corpus
from harness.tool import run_tool, write_json_lines

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


def make_share(prefix: Path, lines: list[dict[str, str]], *flags: object) -> Path:
    source = write_json_lines(prefix.with_suffix(".jsonl"), lines)
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 50)
    done = run_tool("preprocess_data", "--share", "--input", source, "--output-prefix", prefix, "--workers", 1, *tokenizer, *flags)
    assert done.returncode == 0, done.stderr
    return prefix


def merge_shares(folder: Path, *shares: Path) -> subprocess.CompletedProcess[str]:
    return run_tool("merge_datasets", "--shares", "--input", *shares, "--output-prefix", folder / "new" / "merged")


def test_shares_that_differ_in_what_their_ids_depend_on_or_have_lost_a_file_are_refused(tmp_path: Path) -> None:
    first = make_share(tmp_path / "first", [{"text": "1"}])
    done = merge_shares(tmp_path, first, make_share(tmp_path / "second", [{"text": "1"}], "--append-eod"))
    assert done.returncode == 2 and f"{tmp_path}/second was made with another tokenizer or other flags than {first}; make" in done.stderr
    first_text = tmp_path / "first_text_document.bin"
    first_text.rename(tmp_path / "elsewhere")
    done = merge_shares(tmp_path, first)
    assert done.returncode == 2 and f"but {first_text} is missing; remove {first}.finished and make the share with" in done.stderr
    (tmp_path / "elsewhere").rename(first_text)
    (tmp_path / "first.finished").rename(tmp_path / "first.unfinished")
    done = merge_shares(tmp_path, first)
    assert done.returncode == 2 and f"{first}.finished cannot be read (No such file or directory); make the share with" in done.stderr
    assert not (tmp_path / "new").exists()


def test_shares_without_text_are_refused_if_no_share_has_text(tmp_path: Path) -> None:
    keys = ("--json-keys", "text", "title")
    empty = [make_share(tmp_path / name, lines, *keys) for name, lines in [("none", []), ("empty", [{"text": "", "title": ""}])]]
    done = merge_shares(tmp_path, *empty)
    assert done.returncode == 2 and "no share holds a document with text under --json-keys text title; name the keys" in done.stderr
    assert not (tmp_path / "new").exists()
    done = merge_shares(tmp_path, *empty, make_share(tmp_path / "full", [{"text": "", "title": "7"}], *keys))
    assert done.returncode == 0, done.stderr
    text, title = (IndexedDataset(str(tmp_path / "new" / f"merged_{key}_document")) for key in ("text", "title"))
    assert (text.document_starts.tolist(), title.document_starts.tolist()) == ([0, 0, 0], [0, 0, 1])


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
