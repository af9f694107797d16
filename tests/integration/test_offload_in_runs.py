"""Runs whose optimizer is on the host equal runs without, and go on as such and from such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.rank_pool import RankPool
from harness.tiny_corpus import write_corpus
from harness.tiny_runs import losses, pretrain, validation_losses

SAVED_AT, END = 1, 3
OFFLOAD = "--optimizer-cpu-offload"
FP16 = "--fp16 --initial-loss-scale 262144 --hysteresis 1"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    return Path(write_corpus(tmp_path, [generator.integers(0, 100, size=generator.integers(5, 40)).tolist() for _ in range(60)]))


@pytest.mark.parametrize(
    "row, saves",
    [
        pytest.param(f"--zero-stage 2 {FP16}", "--async-save", marks=pytest.mark.long),
        ("--zeropp paper --bf16 --recompute-granularity full --recompute-method uniform --log-params-norm", "--async-save"),
        pytest.param("--zeropp lean --bf16 --quantization-block-size 256", "", marks=pytest.mark.long),
    ],
    ids=["stage 2, fp16", "ZeRO++, recomputed", "lean"],
)
def test_a_run_goes_on_with_offload_from_one_without_and_the_other_way_round_bit_for_bit(
    ranks: RankPool, tmp_path: Path, corpus: Path, row: str, saves: str
) -> None:
    common = (
        f"--data-path {corpus} --split 80,10,10 --tokenizer-type NullTokenizer --train-iters {END} --micro-batch-size 2 "
        f"--global-batch-size 16 --eval-iters 1 --eval-interval 1 {row}"
    )

    def run(name: str, flags: str) -> list[list[Any]]:
        records = pretrain(ranks, 2, 2, f"{common} {flags}", tmp_path / f"{name}.jsonl")
        return [losses(records), validation_losses(records), [record["params_norm"] for record in records if "params_norm" in record]]

    saving = f"{saves} --save-interval {SAVED_AT} --save {tmp_path}"
    whole = run("without", f"{saving}/without")
    assert run("with", f"{saving}/with {OFFLOAD}") == whole and len(whole[0]) == END
    rest = [values[SAVED_AT:] for values in whole]
    assert run("onto the host", f"--load {tmp_path}/without --ckpt-step {SAVED_AT} {OFFLOAD}") == rest
    assert run("off the host", f"--load {tmp_path}/with --ckpt-step {SAVED_AT}") == rest
