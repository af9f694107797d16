import argparse
from pathlib import Path

import build_data_cache
import pytest
from harness.tiny_corpus import write_corpus
from harness.tool import run_tool

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --tokenizer-type NullTokenizer --vocab-size 100 --lr 1e-3"


def run_here(*flags: object, ranks: int = 1) -> None:
    """Runs the tool in this process, which has imported torch already."""
    build_data_cache.run(argparse.Namespace(ranks=ranks, no_token_check=False), [*MODEL.split(), *map(str, flags)])


def test_the_tool_builds_what_the_run_then_finds(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path, [[number] * 90] * 20, name=f"c{number}") for number in (1, 2)]
    flags = ["--data-path", "0.3", prefixes[0], "0.7", prefixes[1], "--data-cache-path", tmp_path / "cache"]
    flags += "--train-iters 5 --eval-iters 1 --eval-interval 2 --split 8,1,1".split()
    run_here(*flags, ranks=4)
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert sum("-GPTDataset-" in name for name in made) == 2 * 3 * 6 and sum("token-check.json" in name for name in made) == 2
    again = run_tool("build_data_cache", "--ranks", 2, *MODEL.split(), *flags, "--micro-batch-size", 2)
    assert again.returncode == 0, again.stderr
    # 5 steps of four samples. Validation after steps 2 and 4 and at the end. Each share is rounded up.
    assert "training: 20 samples of 2 corpora" in again.stdout and "validation: 13 samples of 2 corpora" in again.stdout
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == made


def test_what_the_run_would_refuse_is_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[100] * 90])
    with pytest.raises(ValueError, match="token id 100"):
        run_here("--data-path", prefix, "--train-iters", 2, "--split", 1)
    with pytest.raises(ValueError, match="--data-path is not given"):
        run_here()
    assert "argument --ranks: 0 is not a whole number from 1" in run_tool("build_data_cache", "--ranks", 0).stderr
