from pathlib import Path

import pytest
from harness.tiny_corpus import write_corpus
from harness.tool import run_tool
from harness.trained_tokenizers import MODEL_SIZE, write_sentencepiece_model

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 100)


def test_header_lengths_and_samples_are_shown(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[1], [2, 3], [], [4, 5, 6, 7, 8, 99]])
    done = run_tool("inspect_dataset", "--data-path", prefix, "--histogram-png", tmp_path / "lengths.png", "--sample-tokens", 3, *NULL)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:7] == [
        "format MMIDIDX, version 1",
        "token ids uint16 (code 8)",
        "documents 4 (0 of them empty)",
        "sequences 4",
        "tokens 9",
        "bytes 18 in .bin, 122 in .idx",
        "lengths 0 to 6, mean 2.2 tokens",
    ]
    assert [line.split(" #")[0] for line in lines[9:13]] == ["0 1", "1 1", "2 to 3 1", "4 to 7 1"]
    assert "sequence 3: 6 tokens: '4 5 6' ..." in lines
    assert lines[-1] == "intact: every token id is below 100"
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_tokenizer_samples_are_ids(tmp_path: Path) -> None:
    done = run_tool("inspect_dataset", "--data-path", write_corpus(tmp_path, [[7, 8]]), "--num-samples", 1)
    assert "sequence 0: 2 tokens: 7 8\n" in done.stdout
    assert "vocabulary" not in done.stdout


def test_an_empty_corpus_is_shown(tmp_path: Path) -> None:
    done = run_tool("inspect_dataset", "--data-path", write_corpus(tmp_path, []), "--vocab-size", 5)
    assert done.returncode == 0, done.stderr
    assert "no sequence" in done.stdout


@pytest.mark.parametrize(
    ("damage", "arguments", "message"),
    [
        (True, (), "corpus.bin is truncated: it has 2 bytes, its .idx needs 4"),
        (False, ("--vocab-size", 8), "corpus.bin holds token id 8 (document 0), but the vocabulary has 8 ids"),
        (False, ("--histogram-png", "lengths.xyz"), "lengths.xyz is neither a PNG nor an SVG file"),
        (False, ("--num-samples", -1), "argument --num-samples: -1 is not a whole number from 0"),
    ],
)
def test_files_that_do_not_fit_together_end_it_with_exit_code_2(
    tmp_path: Path, damage: bool, arguments: tuple[object, ...], message: str
) -> None:
    prefix = write_corpus(tmp_path, [[7, 8]])
    if damage:
        Path(f"{prefix}.bin").write_bytes(b"\7\0")
    done = run_tool("inspect_dataset", "--data-path", prefix, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_corpus_of_the_earlier_sentencepiece_tokenizer_is_read_with_its_pieces(tmp_path: Path) -> None:
    model = write_sentencepiece_model(tmp_path / "tiny.model")
    prefix = write_corpus(tmp_path, [[5, 6, MODEL_SIZE + 2]] * 3)
    done = run_tool("inspect_dataset", "--data-path", prefix, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model)
    assert done.returncode == 0, done.stderr
    assert "<EOD>" in done.stdout and f"every token id is below {MODEL_SIZE + 5}" in done.stdout
