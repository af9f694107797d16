"""torchrun starts a run again whose rank has died, and the run goes on by itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed.run
from harness.forked import Forked
from harness.places import importing
from harness.rank_pool import RankPool
from harness.tiny_runs import TINY, losses, pretrain

TORCHRUN = Path(torch.distributed.run.__file__)
FLAGS = "--zero-stage 3 --train-iters 5 --global-batch-size 4"


def test_after_a_rank_was_killed_torchrun_s_restart_ends_with_the_losses_of_the_unbroken_run(ranks: RankPool, tmp_path: Path) -> None:
    whole = losses(pretrain(ranks, 1, 2, FLAGS, tmp_path / "whole.jsonl"))
    saving = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'} --save-interval 2 --log-jsonl {tmp_path / 'broken.jsonl'}"
    launch = "--standalone --nproc_per_node 2 --max-restarts 1 -m harness.rank_that_dies_once"
    words = [*launch.split(), *TINY, *FLAGS.split(), *saving.split()]
    environment = importing({**os.environ, "ONCE": str(tmp_path / "killed"), "OMP_NUM_THREADS": "1"})
    done = Forked(TORCHRUN, *words, environment=environment).finished(240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    records = [json.loads(line) for line in (tmp_path / "broken.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [1, 2, 3, 3, 4, 5]  # 2 was the last that had been saved
    assert losses(records) == [*whole[:3], *whole[2:]]
