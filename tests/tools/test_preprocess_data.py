import gzip
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from harness.places import ROOT
from harness.tiny_corpus import GOLDEN, counting_documents
from harness.tool import run_tool, run_with_tools, write_json_lines
from harness.trained_tokenizers import write_gpt2_files

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.tokenizers.gpt2 import GPT2BPETokenizer

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 100)


def preprocess(source: Path, prefix: Path, *arguments: object, workers: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs the tool on one source, by default with NULL."""
    return run_tool("preprocess_data", "--input", source, "--output-prefix", prefix, "--workers", workers, *(arguments or NULL))


def documents_of(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.read(i).tolist() for i in range(len(dataset))]


def test_documents_come_out_in_the_order_of_the_lines(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": f"{i} {i + 1}"} for i in range(9)])
    done = preprocess(source, tmp_path / "new" / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert documents_of(str(tmp_path / "new" / "out_text_document")) == [[i, i + 1] for i in range(9)]
    assert done.stdout.startswith("Text to ids: The text already holds the ids, separated by spaces.\n")
    assert "9 documents (0 of them empty), 18 tokens (uint16), 36 bytes in .bin, 222 bytes in .idx" in done.stdout


def test_append_eod_ends_every_document(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "5"}, {"text": "6 7"}])
    assert preprocess(source, tmp_path / "out", *NULL, "--append-eod").returncode == 0
    assert documents_of(str(tmp_path / "out_text_document")) == [[5, 99], [6, 7, 99]]


def test_a_corpus_that_is_replaced_is_named(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": text} for text in ("5", "", "6 7")])
    prefix = f"{tmp_path / 'out'}_text_document"
    assert "replaces" not in preprocess(source, tmp_path / "out").stdout
    assert f"\nreplaces {prefix} (3 documents)\n" in preprocess(source, tmp_path / "out").stdout
    Path(f"{prefix}.idx").write_bytes(b"")
    done = preprocess(source, tmp_path / "out")
    assert f"\nreplaces {prefix}, which cannot be read\n" in done.stdout
    assert documents_of(prefix) == [[5], [6, 7]]


def test_documents_without_an_end_are_said_to_have_none(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "5"}])
    hint = "No document got an end-of-document token; give --append-eod if the model shall learn where a text ends.\n"
    assert preprocess(source, tmp_path / "out").stdout.endswith(hint)
    assert hint not in preprocess(source, tmp_path / "out", *NULL, "--append-eod").stdout


def test_flags_of_megatrons_tool_without_a_purpose_here_are_accepted_with_a_line_each(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "1 2"}])
    flags = "--use-gigatoken --tokenizer-hf-no-use-fast --tokenizer-sentencepiece-ignore-extra-whitespaces --pad-vocab-size".split()
    values = "--null-tokenizer-pad-id -1 --chat-template x --padded-vocab-size 128".split()
    done = preprocess(source, tmp_path / "out", *NULL, *flags, *values)
    assert done.returncode == 0, done.stderr
    named = [line.split()[5] for line in done.stdout.splitlines() if line.startswith("accepted, has no effect here: ")]
    assert named == [*flags, *values[::2]]


def test_a_null_tokenizers_end_of_document_can_be_another_id(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "1 2"}])
    assert preprocess(source, tmp_path / "out", *NULL, "--append-eod", "--null-tokenizer-eod-id", 7).returncode == 0
    assert documents_of(f"{tmp_path / 'out'}_text_document") == [[1, 2, 7]]


def test_every_json_key_has_its_own_files(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"title": "1", "body": "2 3"}, {"title": "", "body": "4"}])
    done = preprocess(source, tmp_path / "out", *NULL, "--json-keys", "title", "body")
    assert documents_of(str(tmp_path / "out_title_document")) == [[1]]
    assert documents_of(str(tmp_path / "out_body_document")) == [[2, 3], [4]]
    assert "out_title_document: 2 documents (1 of them empty), 1 token (uint16)" in done.stdout


def test_the_key_may_be_named_as_for_the_training_of_a_tokenizer(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"title": "1"}])
    assert preprocess(source, tmp_path / "out", *NULL, "--json-key", "title").returncode == 0
    assert documents_of(str(tmp_path / "out_title_document")) == [[1]]
    done = run_tool("train_tokenizer", "--input", source, "--model-prefix", tmp_path / "tok", "--json-keys", "body")
    assert 'line 1: key "body" is missing (found: title)' in done.stderr


def test_empty_documents_have_no_sequence_and_blank_lines_are_no_documents(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n\n{"text": ""}\n  \r\n{"text": "2"}')
    done = preprocess(source, tmp_path / "out", *NULL, "--append-eod")
    assert documents_of(str(tmp_path / "out_text_document")) == [[1, 99], [2, 99]]
    # As in Megatron, an empty document ends where it begins.
    assert IndexedDataset(str(tmp_path / "out_text_document")).document_starts.tolist() == [0, 1, 1, 2]
    assert "3 documents (1 of them empty), 4 tokens" in done.stdout


def test_the_golden_corpus_comes_out_in_megatrons_bytes(tmp_path: Path) -> None:
    documents = counting_documents(GOLDEN["dataset"]["doc_lengths"])
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": " ".join(map(str, document))} for document in documents])
    assert preprocess(source, tmp_path / "out").returncode == 0
    for ending in ("bin", "idx"):
        content = (tmp_path / f"out_text_document.{ending}").read_bytes()
        assert hashlib.sha256(content).hexdigest() == GOLDEN["dataset"][f"{ending}_sha256"]


def test_large_vocabularies_are_stored_in_int32(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "70000 1"}])
    assert preprocess(source, tmp_path / "out", "--tokenizer-type", "NullTokenizer", "--vocab-size", 70001).returncode == 0
    assert IndexedDataset(str(tmp_path / "out_text_document")).dtype.name == "int32"
    assert documents_of(str(tmp_path / "out_text_document")) == [[70000, 1]]


def test_files_globs_folders_and_standard_input_are_read_in_the_order_they_are_named(tmp_path: Path) -> None:
    lines = [f'{{"text": "{i}"}}\n'.encode() for i in range(12)]
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "plain.jsonl").write_bytes(b"".join(lines[:2]))
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(lines[2]) + gzip.compress(lines[3]))
    frames = [zstandard.ZstdCompressor().compress(line) for line in (lines[4], lines[5])]
    (tmp_path / "two.jsonl.zst").write_bytes(b"".join(frames))
    (tmp_path / "folder" / "a.json").write_bytes(lines[6])
    (tmp_path / "folder" / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(lines[7]))
    (tmp_path / "folder" / "readme.txt").write_bytes(b"no documents")
    for i in (8, 9):
        (tmp_path / f"part{i}.jsonl").write_bytes(lines[i])
    words = [tmp_path / "plain.jsonl", tmp_path / "two.jsonl.gz", tmp_path / "two.jsonl.zst", tmp_path / "folder", tmp_path / "part*.jsonl"]
    command = [sys.executable, "tools/preprocess_data.py", "--input", *map(str, words), "-", "--output-prefix", str(tmp_path / "out")]
    flags = ["--workers", "2", "--partitions", "4", "--keep-sequential-samples", *map(str, NULL)]
    done = subprocess.run([*command, *flags], cwd=ROOT, input=b"".join(lines[10:]), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert documents_of(str(tmp_path / "out_text_document")) == [[i] for i in range(12)]


def test_a_bad_line_of_standard_input_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "tools/preprocess_data.py", "--input", "-", "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    lines = b'{"text": "1 2 3"}\n' * 50_000 + b"{\n"
    done = subprocess.run([*command, *map(str, NULL)], cwd=ROOT, input=lines, capture_output=True, check=False)
    assert b"-, line 50001: not JSON" in done.stderr
    assert b"--resume" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_the_output_can_be_the_input_of_a_run_that_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "1 2 3"}\n' * 50_000 + b"{\n")
    stopped = preprocess(tmp_path, tmp_path / "out")
    assert "line 50001: not JSON" in stopped.stderr
    assert (tmp_path / "out.unfinished").exists()
    done = preprocess(tmp_path, tmp_path / "out", *NULL, "--resume", "--skip-invalid")
    assert done.returncode == 0, done.stderr
    assert len(IndexedDataset(str(tmp_path / "out_text_document"))) == 50_000


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst"])
def test_a_compressed_file_that_is_cut_off_is_refused(tmp_path: Path, name: str) -> None:
    text = b'{"text": "1 2 3"}\n' * 50_000
    whole = gzip.compress(text) if name.endswith("gz") else zstandard.ZstdCompressor().compress(text)
    (tmp_path / name).write_bytes(whole[:-20])
    done = preprocess(tmp_path / name, tmp_path / "out")
    assert done.returncode == 2
    assert f"{tmp_path / name} is damaged or cut off" in done.stderr
    assert not (tmp_path / "out_text_document.idx").exists()
    (tmp_path / name).write_bytes(text[:100])
    assert f"{name} is not compressed, although its name says so" in preprocess(tmp_path / name, tmp_path / "new").stderr


def test_several_workers_write_the_bytes_of_one(tmp_path: Path) -> None:
    # More text than one batch, in documents of different lengths.
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


def test_the_tool_says_what_encodes_and_several_workers_that_remember_words_write_the_bytes_of_one(tmp_path: Path) -> None:
    vocabulary, merges = write_gpt2_files(tmp_path)
    texts = ["known words, again and again\n" * 60, "\u0378 is unassigned", "", "don't <|endoftext|> é 漢字"] * 400
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": f"{text}{number}"} for number, text in enumerate(texts)])
    flags = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocabulary, "--merge-file", merges)
    for workers in (1, 2):
        done = preprocess(source, tmp_path / f"out{workers}", *flags, workers=workers)
        assert re.match(r"Text to ids: (gigatoken|tiktoken) encodes, (with the ids of|because gigatoken cannot)", done.stdout), done.stderr
    tokenizer = GPT2BPETokenizer(vocabulary, merges)
    expected = [tokenizer.tokenize(f"{text}{number}") for number, text in enumerate(texts)]
    assert documents_of(str(tmp_path / "out1_text_document")) == documents_of(str(tmp_path / "out2_text_document")) == expected


@pytest.mark.parametrize(
    ("line", "message", "workers"),
    [
        (b'{"text": "1"', "not JSON", 1),
        (b'{"text": "1"', "not JSON", 2),
        (b"[1]", "holds list, but a JSON object is needed", 1),
        (b'{"body": "1"}', 'key "text" is missing (found: body); --json-keys', 1),
        (b'{"text": 3}', 'key "text" holds int, but a string is needed', 1),
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


def test_invalid_lines_are_left_out_counted_and_listed_where_that_is_asked_for(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        b'{"text": "1", "more": "5"}\n[\n{"text": "2", "more": "x"}\n{"more": "3"}\n{"text": "\xff"}\n{"text": "4", "more": ""}'
    )
    done = preprocess(source, tmp_path / "out", *NULL, "--skip-invalid", "--json-keys", "text", "more")
    assert done.returncode == 0, done.stderr
    # A line that is bad for one key is left out for all.
    assert documents_of(str(tmp_path / "out_text_document")) == [[1], [4]]
    assert documents_of(str(tmp_path / "out_more_document")) == [[5]]
    listed = (tmp_path / "out_skipped_lines.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in listed] == [f"{source}, line {number}" for number in (2, 3, 4, 5)]
    assert f"4 invalid lines skipped, listed in {tmp_path}/out_skipped_lines.txt" in done.stdout
    assert "ids separated by spaces" in listed[1]
    # The list of an earlier run is removed with its files.
    source.write_bytes(b'{"text": "1", "more": "5"}\n')
    assert preprocess(source, tmp_path / "out", *NULL, "--skip-invalid", "--json-keys", "text", "more").returncode == 0
    assert not (tmp_path / "out_skipped_lines.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*NULL, "--partitions", 0), "argument --partitions: 0 is not a whole number from 1"),
        ((*NULL, "--split-sentences"), "--split-sentences is not available: GPT reads documents"),
        ((*NULL, "--workers", 10**6), "argument --workers: 1000000 is not a whole number from 1 to 1024"),
        ((*NULL, "--max-documents", 10**30), "is not a whole number from 1 to 1099511627776"),
        ((*NULL, "--journal-interval", "nan"), "--journal-interval nan must be 0 or more"),
        ((*NULL, "--journal-interval", -1), "--journal-interval -1"),
        ((*NULL, "--input", "-", "--resume"), "--resume cannot read standard input again"),
        ((), "--tokenizer-type must be given; choose one of GPT2BPETokenizer"),
        ((*NULL, "--output-prefix", ""), "--output-prefix is empty; give the path"),
        ((*NULL, "--json-keys", "a", "a"), "names a key twice"),
        ((*NULL, "--log-interval", 0), "argument --log-interval: 0 is not a whole number from 1"),
        ((*NULL, "--workers-to-check", 1, 0), "argument --workers-to-check: 0 is not a whole number from 1 to 1024"),
        ((*NULL, "--find-optimal-num-workers", "--input", "-"), "--input - can be read only once; give files"),
        (("--tokenizer-type", "NullTokenizer"), "needs --vocab-size"),
        (("--tokenizer-type", "SentencePieceTokenizer"), "needs --tokenizer-model"),
        (("--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", "nowhere"), "--tokenizer-model nowhere does not exist"),
        ((*NULL, "--special-tokens", "<x>"), "--tokenizer-special-tokens <x> needs --tokenizer-type TikTokenizer"),
        ((*NULL, "--tokenizer-sentencepiece-legacy"), "--tokenizer-sentencepiece-legacy is not accepted; use --legacy-tokenizer"),
        ((*NULL, "--metadata-path", "m.json"), "--metadata-path is not accepted; use --tokenizer-type and --tokenizer-model"),
        ((*NULL, "--no-pad-vocab-size"), "--no-pad-vocab-size is not accepted; use --make-vocab-size-divisible-by 1"),
        ((*NULL, "--null-tokenizer-eod-id", 1000), "--null-tokenizer-eod-id 1000 is not below --vocab-size"),
        ((*NULL, "--append"), "--append is not a flag of this tool; see --help for the list."),
        (("--tokenizer-type", "WordPiece"), "invalid choice: 'WordPiece'"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    done = run_tool("preprocess_data", "--input", source, "--output-prefix", tmp_path / "out", "--workers", 1, *arguments)
    assert done.returncode == 2
    assert "preprocess_data.py: error: " in done.stderr
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_missing_or_empty_input_is_refused(tmp_path: Path) -> None:
    assert "--input nowhere.jsonl is not a file, a folder or a glob" in preprocess(Path("nowhere.jsonl"), tmp_path / "out").stderr
    assert "is a folder without files that end in .jsonl" in preprocess(tmp_path, tmp_path / "out").stderr
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": ""}])
    done = preprocess(source, tmp_path / "out")
    assert (done.returncode, [path.name for path in tmp_path.iterdir()]) == (2, ["in.jsonl"])
    assert "holds no document with text: what lies under --json-keys text is empty" in done.stderr
    source.write_text('{"text": ""}\n{\n[]\n')
    done = preprocess(source, tmp_path / "out", *NULL, "--skip-invalid")
    assert (done.returncode, [path.name for path in tmp_path.iterdir()]) == (2, ["in.jsonl"])
    assert f"no document with text: 2 lines are invalid, the first is {source}, line 2: not JSON" in done.stderr


def test_a_share_may_have_documents_without_text_and_no_documents(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": ""}, {"text": ""}])
    assert preprocess(source, tmp_path / "out", *NULL, "--share").returncode == 0
    assert IndexedDataset(str(tmp_path / "out_text_document")).document_starts.tolist() == [0, 0, 0]
    source.write_text("\n")
    assert preprocess(source, tmp_path / "out", *NULL, "--share").returncode == 0
    assert IndexedDataset(str(tmp_path / "out_text_document")).document_starts.tolist() == [0]


def test_the_best_number_of_workers_is_found_without_writing(tmp_path: Path) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "1 2"}] * 10)
    done = preprocess(source, tmp_path / "out", *NULL, "--find-optimal-num-workers", "--workers-to-check", 1, 2, "--max-documents", 5)
    assert done.returncode == 0, done.stderr
    assert "The fastest is --workers" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_preprocessing_imports_no_torch() -> None:
    code = "import sys, preprocess_data; sys.exit('torch' in sys.modules)"
    assert run_with_tools("-c", code).returncode == 0


def run_with_patch(tmp_path: Path, patch: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of Python, then the tool with two workers on the document 1 2."""
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "1 2"}])
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--workers", "2", *map(str, NULL)]
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, sys\nimport preprocess_data\nfrom megatron_zpp.data.preprocess import document_encoder\n"
        f"if __name__ == '__main__':\n    {patch}\n    sys.argv[1:] = {json.dumps(arguments)}\n    preprocess_data.main()\n"
    )
    return run_with_tools(str(script))


def test_worker_processes_started_afresh_get_the_encoder(tmp_path: Path) -> None:
    done = run_with_patch(tmp_path, "multiprocessing.set_start_method('spawn')")
    assert done.returncode == 0, done.stderr
    assert documents_of(str(tmp_path / "out_text_document")) == [[1, 2]]


def test_a_worker_that_is_killed_ends_the_tool(tmp_path: Path) -> None:
    done = run_with_patch(tmp_path, "multiprocessing.set_start_method('fork'); document_encoder.read_texts = lambda *_: os._exit(9)")
    assert done.returncode == 2
    assert done.stderr == "preprocess_data.py: error: a worker process was ended from outside, perhaps for memory; give fewer --workers.\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "script.py"]
