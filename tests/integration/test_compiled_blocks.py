"""--compile: other kernels, the same training."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.rank_pool import RankPool
from harness.tiny_runs import losses, pretrain


def test_compiled_blocks_train_alike_while_weights_come_and_go(ranks: RankPool, tmp_path: Path) -> None:
    """Weights are at rest between the uses of a block, dropout is on, and blocks are recomputed in a chunk."""
    flags = "--train-iters 4 --micro-batch-size 2 --zero-stage 3 --checkpoint-activations --checkpoint-num-layers 2 "
    flags += "--normalization RMSNorm --disable-bias-linear"
    plain, compiled = (losses(pretrain(ranks, 1, 1, f"{flags} {extra}", tmp_path / f"run{extra}.jsonl")) for extra in ("", "--compile"))
    assert len(compiled) == 4
    assert [loss for loss, _ in compiled] == pytest.approx([loss for loss, _ in plain], rel=1e-5)
    assert [norm for _, norm in compiled] == pytest.approx([norm for _, norm in plain], rel=1e-4)
