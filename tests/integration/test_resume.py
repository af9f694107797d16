"""A resumed run equals one that never stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness.rank_pool import RankPool
from harness.tiny_corpus import write_corpus
from harness.tiny_runs import losses, pretrain

SAVED_AT, END = 4, 7


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """60 documents of 5 to 40 tokens: an epoch ends every few steps."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 100, size=generator.integers(5, 40)).tolist() for _ in range(60)]
    return Path(write_corpus(tmp_path, documents))


def flags(corpus: Path, precision: str, stage: int) -> str:
    return (
        f"--data-path {corpus} --split 80,10,10 --tokenizer-type NullTokenizer --train-iters {END} --micro-batch-size 2 "
        f"--global-batch-size 16 --eval-iters 1 --eval-interval 3 --zero-stage {stage} {precision}"
    )


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, ""), (3, "--bf16"), (3, "--fp16 --initial-loss-scale 65536 --loss-scale-window 3")], ids=str
)
def test_resume_equals_not_having_stopped_bit_for_bit(ranks: RankPool, tmp_path: Path, corpus: Path, stage: int, precision: str) -> None:
    common = flags(corpus, precision, stage)
    whole = pretrain(ranks, 2, 2, common, tmp_path / "whole.jsonl")
    checkpoints = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    pretrain(ranks, 2, 2, f"{common} {checkpoints} --exit-interval {SAVED_AT}", tmp_path / "parts.jsonl")
    parts = pretrain(ranks, 2, 2, f"{common} {checkpoints}", tmp_path / "parts.jsonl")
    assert len(losses(whole)) == END
    assert [told(record) for record in parts] == [told(record) for record in whole]


def test_a_checkpoint_of_one_world_and_stage_goes_on_in_another_within_fp32_rounding(ranks: RankPool, tmp_path: Path, corpus: Path) -> None:
    whole = pretrain(ranks, 2, 2, flags(corpus, "", 3), tmp_path / "whole.jsonl")
    checkpoints = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    pretrain(ranks, 2, 2, f"{flags(corpus, '', 3)} {checkpoints} --exit-interval {SAVED_AT}", tmp_path / "parts.jsonl")
    parts = pretrain(ranks, 1, 2, f"{flags(corpus, '', 0)} {checkpoints}", tmp_path / "parts.jsonl")
    assert [loss for loss, _ in losses(parts)] == pytest.approx([loss for loss, _ in losses(whole)], rel=1e-6)


def test_a_dynamic_loss_scale_does_not_start_from_the_constant_one_of_another_precision(
    ranks: RankPool, tmp_path: Path, corpus: Path
) -> None:
    checkpoints = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    pretrain(ranks, 1, 2, f"{flags(corpus, '--bf16', 3)} {checkpoints} --exit-interval 2", tmp_path / "bf16.jsonl")
    records = pretrain(ranks, 1, 2, f"{flags(corpus, '--fp16 --initial-loss-scale 1024', 3)} {checkpoints}", tmp_path / "fp16.jsonl")
    assert records[0]["iteration"] == 3 and records[0]["loss_scale"] == 1024


def test_the_last_iteration_is_logged_also_between_log_intervals(ranks: RankPool, tmp_path: Path) -> None:
    records = pretrain(ranks, 1, 2, "--train-iters 5 --log-interval 2", tmp_path / "run.jsonl")
    assert [record["iteration"] for record in records] == [2, 4, 5]


def told(record: dict[str, float]) -> dict[str, float]:
    """What a record says of the training, without clocks and memory."""
    measured = {"elapsed_ms_per_iteration", "data_ms_per_iteration", "tokens_per_second", "tflops_per_gpu", "max_memory_bytes"}
    measured |= {"model_tflops_per_gpu", "eta_seconds"}
    return {key: value for key, value in record.items() if key not in measured}
