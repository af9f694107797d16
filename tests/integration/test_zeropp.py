"""ZeRO++ in whole runs: hpZ changes no bit, qwZ and qgZ change little, and a resumed run goes on with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.rank_pool import RankPool
from harness.tiny_runs import losses, pretrain, validation_losses

STEPS = 4
HPZ = "--zero-hpz-partition-size 2"
ALL = f"--zero-quantized-weights {HPZ} --zero-quantized-gradients"
BY_CHANCE = "--zero-quantized-gradients-rotation hadamard --zero-quantized-gradients-rounding stochastic"
BUSY = f"--zero-stage 3 --train-iters {STEPS} --global-batch-size 8 --eval-interval 2 --eval-iters 1 --checkpoint-activations"


# More worlds, rows and dtypes: tests/zero/test_secondary_weights.py.
@pytest.mark.parametrize(
    ("precision", "others"),
    [
        ("--bf16", f"--zero-quantized-weights --zero-quantized-gradients {BY_CHANCE}"),
        ("--fp16 --initial-loss-scale 262144 --hysteresis 1", ""),
    ],
    ids=["bf16, qwZ+qgZ", "fp16, plain"],
)
def test_a_secondary_copy_changes_no_bit_of_the_loss(ranks: RankPool, tmp_path: Path, precision: str, others: str) -> None:
    without = pretrain(ranks, 2, 2, f"{BUSY} {precision} {others}", tmp_path / "without.jsonl")
    kept = pretrain(ranks, 2, 2, f"{BUSY} {precision} {others} {HPZ}", tmp_path / "with.jsonl")
    assert len(losses(kept)) == STEPS
    assert losses(kept) == losses(without)
    assert validation_losses(kept) == validation_losses(without) and len(validation_losses(kept)) == STEPS // 2
    if "fp16" in precision:
        skipped = [record["skipped_iterations"] for record in kept if "lm_loss" in record]
        assert 0 < sum(map(bool, skipped)) < STEPS


def test_a_resumed_run_of_all_three_has_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"--zero-stage 3 --bf16 --train-iters 4 --global-batch-size 8 {ALL} {BY_CHANCE} --zero-full-precision-iters 1"
    whole = pretrain(ranks, 2, 2, f"{flags} --save {tmp_path / 'saved'} --save-interval 2", tmp_path / "whole.jsonl")
    rest = pretrain(ranks, 2, 2, f"{flags} --load {tmp_path / 'saved'} --ckpt-step 2", tmp_path / "rest.jsonl")
    assert losses(rest) == losses(whole)[2:]


def test_a_first_iteration_in_full_precision_is_that_of_plain_zero(ranks: RankPool, tmp_path: Path) -> None:
    flags = "--zero-stage 3 --bf16 --train-iters 3 --global-batch-size 4"
    plain = losses(pretrain(ranks, 2, 2, flags, tmp_path / "plain.jsonl"))
    late = losses(pretrain(ranks, 2, 2, f"{flags} {ALL} --zero-full-precision-iters 1", tmp_path / "late.jsonl"))
    assert late[:1] == plain[:1] and all(one != other for one, other in zip(late[1:], plain[1:], strict=True))


LEAN = "--zeropp lean --quantization-block-size 256 --bf16"


def test_a_resumed_lean_run_has_the_same_bits_also_after_an_asynchronous_save(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"{LEAN} --train-iters 4 --global-batch-size 8 --zero-full-precision-iters 1 --eval-interval 2 --eval-iters 1"
    whole = pretrain(ranks, 2, 2, flags, tmp_path / "whole.jsonl")
    checkpoints = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'} --async-save"
    pretrain(ranks, 2, 2, f"{flags} {checkpoints} --exit-interval 2", tmp_path / "parts.jsonl")
    parts = pretrain(ranks, 2, 2, f"{flags} {checkpoints}", tmp_path / "parts.jsonl")
    assert losses(parts) == losses(whole) and len(losses(whole)) == 4
    assert validation_losses(parts) == validation_losses(whole)


@pytest.mark.parametrize(
    "rows",
    [
        [f"--zero-quantized-weights --zero-quantized-gradients --zero-stage {others}" for others in ("1", "2", "3", f"3 {HPZ}")],
        [f"{LEAN} --zero-stage {stage}" for stage in (1, 2, 3)],
    ],
    ids=["quantized", "lean"],
)
def test_quantized_stages_have_the_same_bits_with_one_microbatch(ranks: RankPool, tmp_path: Path, rows: list[str]) -> None:
    first, *others = (
        losses(pretrain(ranks, 2, 2, f"--bf16 --train-iters {STEPS} {row}", tmp_path / f"{number}.jsonl"))
        for number, row in enumerate(rows)
    )
    assert len(first) == STEPS and all(other == first for other in others)
