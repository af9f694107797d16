"""Runs whose optimizer is on the host equal runs without, and go on as such and from such."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness.rank_pool import RankPool
from harness.tiny_corpus import write_corpus
from harness.tiny_runs import losses, pretrain, validation_losses

SAVED_AT, END = 3, 6
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
    whole = pretrain(ranks, 2, 2, common, tmp_path / "whole.jsonl")
    for first, second in ((OFFLOAD, ""), ("", OFFLOAD)):
        name = first or "without"
        checkpoints = f"--save {tmp_path / name} --load {tmp_path / name} {saves}"
        pretrain(ranks, 2, 2, f"{common} {checkpoints} {first} --exit-interval {SAVED_AT}", tmp_path / f"{name}.jsonl")
        parts = pretrain(ranks, 2, 2, f"{common} {checkpoints} {second}", tmp_path / f"{name}.jsonl")
        assert losses(parts) == losses(whole) and len(losses(whole)) == END
        assert validation_losses(parts) == validation_losses(whole)
        assert [record.get("params_norm") for record in parts] == [record.get("params_norm") for record in whole]
