import json
import math
from pathlib import Path

import pytest
from harness.tool import run_tool, write_json_lines


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    source = write_json_lines(tmp_path / "in.jsonl", [{"text": "0 0 1"}, {"text": "2 0"}, {"text": "0 3"}])
    arguments = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 4, "--workers", 1)
    run_tool("preprocess_data", "--input", source, "--output-prefix", tmp_path / "out", *arguments)
    return tmp_path / "out_text_document"


def test_the_tool_prints_the_cross_entropy_of_the_validation_split(prefix: Path) -> None:
    done = run_tool("corpus_statistics", "--data-path", prefix, "--split", "2,1", "--vocab-size", 4)
    sentence, figures = done.stdout.splitlines()
    # Training holds 0 0 1 2 0: with one added to each of 4 ids, p(0) = 4/9 and p(3) = 1/9.
    expected = -(math.log(4 / 9) + math.log(1 / 9)) / 2
    assert json.loads(figures)["unigram_cross_entropy_nats"] == pytest.approx(expected, rel=1e-12)
    assert (json.loads(figures)["train_tokens"], json.loads(figures)["valid_tokens"]) == (5, 2)
    assert f"{expected:.4f} nats per token" in sentence


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--split", "1", "--vocab-size", 4), "no validation token"),
        (("--split", "x", "--vocab-size", 4), "--split is not a list of numbers"),
        (("--vocab-size", 3), "holds token id 3"),
    ],
)
def test_unusable_requests_are_refused(prefix: Path, arguments: tuple[object, ...], message: str) -> None:
    done = run_tool("corpus_statistics", "--data-path", prefix, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("corpus_statistics.py: error: ")
    assert message in done.stderr
