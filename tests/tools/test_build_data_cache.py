import argparse
from pathlib import Path

import build_data_cache
import pytest
from harness.stored_manifest import manifest_of_run, write_manifest
from harness.tiny_corpus import write_corpus
from harness.tool import run_tool

from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.data.build_once import SILENT
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training import setup
from megatron_zpp.training.kept_rules import with_kept_rules
from megatron_zpp.training.stored_run import find_stored_run

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


def samples_found_by_run(folder: Path, flags: str, ranks: int) -> int:
    """Samples of the training data of a run with these flags, which must find everything about the corpora of `folder` built."""
    built = times_of(folder)
    config = resolve(with_checkpoint_args(parse_flags(flags.split())), ranks, ranks)
    stored = find_stored_run(config.checkpoint)
    config, _ = with_kept_rules(config, stored)
    datasets = setup.build_run_data(config, setup.build_vocabulary(config), stored, SILENT, checks_token_ids=True)
    assert times_of(folder) == built
    return len(datasets.train)


def times_of(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*.cache/*")}


def test_ranks_are_all_ranks_of_the_run_also_those_that_share_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_corpus(tmp_path, [[number] * 8 for number in range(20)])
    flags = f"--data-path {prefix} --split 1 --eval-iters 0 --train-iters 5 --micro-batch-size 2 --tensor-model-parallel-size 2"
    run_here(*flags.split(), ranks=4)
    assert 5 * 2 * 2 <= samples_found_by_run(tmp_path, f"{MODEL} {flags}", 4) < 5 * 2 * 4
    with pytest.raises(SystemExit):
        build_data_cache._parser().parse_args(["--help"])
    assert "all ranks of the run" in capsys.readouterr().out


def test_what_a_resumed_run_takes_from_its_checkpoint_the_tool_takes_too(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[number] * 90 for number in range(20)])
    data = f"--data-path {prefix} --split 1 --eval-iters 0 --train-iters 50"
    first = resolve(parse_flags(f"{MODEL} {data} --global-batch-size 8".split()), 1, 1)
    write_manifest(tmp_path / "saved", manifest_of_run(first, 128, iteration=30, consumed_samples=240))
    flags = f"{data} --load {tmp_path / 'saved'} --use-checkpoint-args --global-batch-size 4 --lr 1e-3"
    build_data_cache.run(argparse.Namespace(ranks=1, no_token_check=False), flags.split())
    assert samples_found_by_run(tmp_path, flags, 1) >= 50 * 8


def test_what_the_run_would_refuse_is_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path, [[100] * 90])
    with pytest.raises(UserError, match="token id 100"):
        run_here("--data-path", prefix, "--train-iters", 2, "--split", 1)
    with pytest.raises(UserError, match="--data-path is not given"):
        run_here()
    assert run_tool("build_data_cache", "--ranks", 0).stderr.startswith("build_data_cache.py: error: argument --ranks: 0 is not a whole")
