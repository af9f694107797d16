"""A run goes on in any world and at any stage as if nothing had happened."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from harness.rank_pool import RankPool
from harness.tiny_runs import TINY, entry, losses, pretrain

SAVED_AT, END = 3, 6
SMALL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 3 "
COMMON = f"{SMALL} --train-iters {END} --global-batch-size 12 --micro-batch-size 1"
SAVING = "--zero-stage 3 --zero-hpz-partition-size 2"


def entry_with_slow_copies(flags: list[str]) -> int:
    """The entry, whose --async-save copies the state so slowly that the next update has to wait for it."""
    from megatron_zpp.checkpoint.snapshot import HostSnapshot

    copy = HostSnapshot.copy

    def slow_copy(snapshot: HostSnapshot) -> None:
        time.sleep(0.2)
        copy(snapshot)

    HostSnapshot.copy = slow_copy  # type: ignore[method-assign]
    try:
        return entry(flags)
    finally:
        HostSnapshot.copy = copy  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def unbroken(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The checkpoints and records of a run on two nodes of two ranks that writes checkpoints while it trains, dropout on."""
    folder = tmp_path_factory.mktemp("unbroken")
    saving = f"--save {folder / 'saved'} --save-interval {SAVED_AT} --async-save --log-jsonl {folder / 'run.jsonl'}"
    assert ranks.run(2, 2, entry_with_slow_copies, [*TINY, *f"{COMMON} {SAVING} {saving}".split()]) == [0, 0, 0, 0]
    return folder / "saved", [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "stage"),
    [
        pytest.param(1, 1, "--zero-stage 0", marks=pytest.mark.long),
        (1, 3, "--zero-stage 2"),
        (2, 2, SAVING),
        pytest.param(3, 2, "--zero-stage 1", marks=pytest.mark.long),
    ],
)
def test_the_next_losses_are_those_of_the_unbroken_run(
    ranks: RankPool, tmp_path: Path, unbroken: tuple[Path, list[dict[str, Any]]], nodes: int, ranks_per_node: int, stage: str
) -> None:
    """Bit for bit in the same world and at the same stage, else within the rounding of fp32 sums in another order."""
    saved, records = unbroken
    flags = f"{COMMON} {stage} --load {saved} --ckpt-step {SAVED_AT}"
    found = losses(pretrain(ranks, nodes, ranks_per_node, flags, tmp_path / "run.jsonl"))
    expected = losses(records)[SAVED_AT:]
    assert len(found) == END - SAVED_AT
    if (nodes, ranks_per_node, stage) == (2, 2, SAVING):
        assert found == expected
    else:
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
