"""Whole runs whose head and loss are computed in chunks: the losses of whole logits, and the same bits wherever states rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.rank_pool import RankPool
from harness.tiny_runs import losses, pretrain, validation_losses
from test_documents_in_runs import DOCUMENTS, blend_of_short_documents

STEPS = 20
# Micro-batches of 32 tokens: three chunks of 9 and one of 5.
RUN = f"--micro-batch-size 2 --train-iters {STEPS} --clip-grad 0.5 --lr 1e-3 --eval-iters 1 --eval-interval 10"
CHUNKS = "--loss-chunk-tokens 9"
STAGE_3 = "--zero-stage 3 --zero-hpz-partition-size 2"


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_20_steps_in_chunks_follow_those_of_whole_logits_and_have_the_same_bits_in_stage_0_and_stage_3(
    ranks: RankPool, tmp_path: Path, is_tied: bool
) -> None:
    """The run with a head of its own has documents in its samples, and tokens whose loss does not count."""
    flags = RUN if is_tied else f"{RUN} --untie-embeddings-and-output-weights {DOCUMENTS} {blend_of_short_documents(tmp_path)}"
    flags = f"{flags} --train-iters {STEPS} --split 9,1,0"
    whole, chunks, stage_3 = (
        pretrain(ranks, 2, 2, f"{flags} {others}", tmp_path / f"{number}.jsonl")
        for number, others in enumerate(["--loss-chunk-tokens 0", CHUNKS, f"{CHUNKS} {STAGE_3} --checkpoint-activations"])
    )
    assert len(losses(whole)) == STEPS
    for found, expected in zip(losses(chunks), losses(whole), strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)
    assert losses(chunks) != losses(whole)  # so the flag arrives
    assert losses(stage_3) == losses(chunks)
    assert len(validation_losses(whole)) >= 2
    assert validation_losses(chunks) == pytest.approx(validation_losses(whole), rel=1e-6)
    assert validation_losses(stage_3) == validation_losses(chunks)


def test_in_bf16_the_first_loss_is_that_of_whole_logits_and_later_ones_stay_near(ranks: RankPool, tmp_path: Path) -> None:
    whole, chunks = (
        losses(pretrain(ranks, 1, 2, f"{RUN} --bf16 {flags}", tmp_path / f"{number}.jsonl"))
        for number, flags in enumerate(["--loss-chunk-tokens 0", CHUNKS])
    )
    # The logits of the first step are products of the same bf16 values, rounded to bf16: 8 bits of values below 1 here, in some hundred
    # tokens whose errors are independent.
    assert chunks[0][0] == pytest.approx(whole[0][0], rel=1e-4)
    # Afterwards weights differ where a rounding decides, and bf16 rounds by 0.4 %.
    assert [loss for loss, _ in chunks] == pytest.approx([loss for loss, _ in whole], rel=4e-3)
