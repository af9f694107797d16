import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tool import ROOT, run_tool, write_json_lines

from megatron_zpp.data.indexed_dataset import IndexedDataset

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 100)


def preprocess(source: Path, prefix: Path, *arguments: object, workers: int = 1) -> subprocess.CompletedProcess[str]:
    return run_tool("preprocess_data", "--input", source, "--output-prefix", prefix, "--workers", workers, *(arguments or NULL))


def documents_of(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.read(i).tolist() for i in range(len(dataset))]


def test_documents_come_out_in_the_order_of_the_lines(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": f"{i} {i + 1}"} for i in range(9)])
    done = preprocess(source, tmp_path / "new" / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert documents_of(str(tmp_path / "new" / "out_text_document")) == [[i, i + 1] for i in range(9)]
    assert "9 documents, 18 tokens (uint16), 0 empty documents skipped, 36 bytes in .bin, 222 bytes in .idx" in done.stdout


def test_append_eod_ends_every_document(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "5"}, {"text": "6 7"}])
    assert preprocess(source, tmp_path / "out", *NULL, "--append-eod").returncode == 0
    assert documents_of(str(tmp_path / "out_text_document")) == [[5, 99], [6, 7, 99]]


def test_every_json_key_has_its_own_files(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"title": "1", "body": "2 3"}, {"title": "", "body": "4"}])
    done = preprocess(source, tmp_path / "out", *NULL, "--json-keys", "title", "body")
    assert documents_of(str(tmp_path / "out_title_document")) == [[1]]
    assert documents_of(str(tmp_path / "out_body_document")) == [[2, 3], [4]]
    assert "out_title_document: 1 documents, 1 tokens (uint16), 1 empty documents skipped" in done.stdout


def test_empty_documents_and_blank_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n\n{"text": ""}\n  \n{"text": "2"}')
    done = preprocess(source, tmp_path / "out", *NULL, "--append-eod")
    assert documents_of(str(tmp_path / "out_text_document")) == [[1, 99], [2, 99]]
    assert "1 empty documents skipped" in done.stdout


def test_several_workers_write_the_bytes_of_one(tmp_path: Path) -> None:
    # More text than one batch holds, in documents of uneven length.
    texts = [" ".join(str((i + j) % 100) for j in range(1 + i * 37 % 2000)) for i in range(1200)]
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    digests = []
    for workers in (1, 2):
        done = preprocess(source, tmp_path / f"out{workers}", *NULL, "--log-interval", 300, workers=workers)
        assert done.returncode == 0
        assert "docs/s" in done.stderr
        assert "MB/s" in done.stderr
        files = [tmp_path / f"out{workers}_text_document.{ending}" for ending in ("bin", "idx")]
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("line", "message", "workers"),
    [
        (b'{"text": "1"', "not JSON", 1),
        (b'{"text": "1"', "not JSON", 2),
        (b"[1]", "holds list, needed is a JSON object", 1),
        (b'{"body": "1"}', 'key "text" is missing (found: body); --json-keys', 1),
        (b'{"text": 3}', 'key "text" holds int, needed is a string', 1),
        (b'{"text": "\xff"}', "not valid UTF-8 at byte 10 of the line", 1),
        (b'{"text": "\\ud800"}', "half of a surrogate pair", 1),
        (b'{"text": "100"}', "id 100 is outside of the vocabulary of 100 ids", 1),
        (b"[" * 100_000, "recursion", 1),
    ],
)
def test_a_bad_line_stops_everything_with_file_and_line_number(tmp_path: Path, line: bytes, message: str, workers: int) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "1"}\n' * 4 + line + b'\n{"text": "1"}\n')
    done = preprocess(source, tmp_path / "out", workers=workers)
    assert done.returncode == 2
    assert done.stderr.startswith(f"preprocess_data.py: error: {source}, line 5: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*NULL, "--partitions", 2), "--partitions 2 is not supported"),
        ((*NULL, "--json-keys", "a", "a"), "names a key twice"),
        ((*NULL, "--log-interval", 0), "--log-interval 0"),
        (("--tokenizer-type", "NullTokenizer"), "needs --vocab-size"),
        (("--tokenizer-type", "SentencePieceTokenizer"), "needs --tokenizer-model"),
        (("--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", "nowhere"), "--tokenizer-model nowhere does not exist"),
        ((*NULL, "--append"), "unrecognized arguments: --append"),
        (("--tokenizer-type", "WordPiece"), "invalid choice: 'WordPiece'"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    done = preprocess(source, tmp_path / "out", *arguments)
    assert done.returncode == 2
    assert "preprocess_data.py: error: " in done.stderr
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_missing_or_empty_input_is_refused(tmp_path: Path) -> None:
    assert "--input nowhere.jsonl is not a file" in preprocess(Path("nowhere.jsonl"), tmp_path / "out").stderr
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": ""}])
    done = preprocess(source, tmp_path / "out")
    assert (done.returncode, [path.name for path in tmp_path.iterdir()]) == (2, ["in.jsonl"])
    assert "holds no document with text" in done.stderr


def test_preprocessing_imports_no_torch() -> None:
    code = "import sys; sys.path.insert(0, 'tools'); import preprocess_data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def run_with_patch(tmp_path: Path, patch: str) -> subprocess.CompletedProcess[str]:
    """The tool with two workers after a line of Python, on the document 1 2."""
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "1 2"}])
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--workers", "2", *map(str, NULL)]
    script = tmp_path / "script.py"
    script.write_text(
        f"import multiprocessing, os, sys\nsys.path.insert(0, {str(ROOT / 'tools')!r})\nimport preprocess_data\n"
        f"if __name__ == '__main__':\n    {patch}\n    sys.argv[1:] = {json.dumps(arguments)}\n    preprocess_data.main()\n"
    )
    return subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False)


def test_worker_processes_started_afresh_get_the_encoder(tmp_path: Path) -> None:
    done = run_with_patch(tmp_path, "multiprocessing.set_start_method('spawn')")
    assert done.returncode == 0, done.stderr
    assert documents_of(str(tmp_path / "out_text_document")) == [[1, 2]]


def test_a_worker_that_is_killed_ends_the_tool(tmp_path: Path) -> None:
    done = run_with_patch(tmp_path, "multiprocessing.set_start_method('fork'); preprocess_data._read_texts = lambda *_: os._exit(9)")
    assert done.returncode == 2
    assert done.stderr == "preprocess_data.py: error: a worker process was ended from outside, perhaps for memory; give fewer --workers.\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "script.py"]
