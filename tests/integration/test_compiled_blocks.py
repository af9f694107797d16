"""--compile: other kernels, the same training."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.rank_pool import RankPool
from harness.tiny_runs import TINY, entry, losses, records_of


def entry_without_vectors(flags: list[str]) -> int:
    """The entry, with scalar kernels. To choose vector instructions, torch would first compile a program for each kind that it knows."""
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": False, "compile_threads": 1}):
        return entry(flags)


def test_compiled_blocks_train_alike_while_weights_come_and_go(ranks: RankPool, tmp_path: Path) -> None:
    """Weights are at rest between the uses of a block, dropout is on, and blocks are recomputed in a chunk.

    Attention drops nothing here, which saves half the kernels; tests/model/test_compilation.py compiles its dropout.
    """
    flags = "--train-iters 4 --micro-batch-size 2 --zero-stage 3 --checkpoint-activations --checkpoint-num-layers 2 "
    flags += "--normalization RMSNorm --disable-bias-linear --attention-dropout 0"
    histories = []
    for name, extra in (("plain", ""), ("compiled", "--compile")):
        log = tmp_path / f"{name}.jsonl"
        assert ranks.run(1, 1, entry_without_vectors, [*TINY, *flags.split(), *extra.split(), "--log-jsonl", str(log)]) == [0]
        histories.append(losses(records_of(log)))
    plain, compiled = histories
    assert len(compiled) == 4
    assert [loss for loss, _ in compiled] == pytest.approx([loss for loss, _ in plain], rel=1e-5)
    assert [norm for _, norm in compiled] == pytest.approx([norm for _, norm in plain], rel=1e-4)
