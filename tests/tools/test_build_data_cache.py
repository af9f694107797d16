from pathlib import Path

from tiny_corpus import write_corpus
from tool import run_tool

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --tokenizer-type NullTokenizer --vocab-size 100 --lr 1e-3"


def test_the_tool_builds_what_the_run_then_finds(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path, [[number] * 90] * 20, name=f"c{number}") for number in (1, 2)]
    flags = [*MODEL.split(), "--data-path", "0.3", prefixes[0], "0.7", prefixes[1], "--data-cache-path", str(tmp_path / "cache")]
    flags += ["--train-iters", "5", "--eval-iters", "1", "--eval-interval", "2", "--split", "8,1,1"]
    first = run_tool("build_data_cache", "--ranks", 4, *flags)
    assert first.returncode == 0, first.stderr
    # 4 ranks of one sample: 5 x 4 in training, 3 x 4 in validations; each share rounded up.
    assert "training: 20 samples of 2 corpora" in first.stdout and "validation: 13 samples of 2 corpora" in first.stdout
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert sum("-GPTDataset-" in name for name in made) == 2 * 3 * 5 and sum("token-check.json" in name for name in made) == 2
    again = run_tool("build_data_cache", "--ranks", 2, *flags, "--micro-batch-size", 2)
    assert again.returncode == 0, again.stderr
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == made


def test_what_the_run_would_refuse_is_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[100] * 90])
    done = run_tool("build_data_cache", "--ranks", 1, *MODEL.split(), "--data-path", prefix, "--train-iters", 2, "--split", 1)
    assert done.returncode == 2
    assert done.stderr.startswith("build_data_cache.py: error: ") and "token id 100" in done.stderr
    assert "--data-path is not given" in run_tool("build_data_cache", "--ranks", 1, *MODEL.split()).stderr
