"""No rank outlives its launcher, which may be killed without a chance to end its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from harness.patience import wait_until
from harness.places import importing
from harness.processes import is_alive
from harness.tiny_runs import TINY


def test_ranks_of_a_killed_torchrun_end_say_why_and_leave_no_lock(tmp_path: Path) -> None:
    flags = f"--zero-stage 3 --train-iters 1000000 --save {tmp_path / 'saved'}".split()
    words = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2 -m harness.watched_rank".split(), *TINY, *flags]
    environment = importing({**os.environ, "WATCHED": str(tmp_path), "OMP_NUM_THREADS": "1"})
    with (tmp_path / "said").open("w") as said:
        torchrun = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=said)
        diaries = [tmp_path / f"rank_{rank}.txt" for rank in range(2)]
        while not all(diary.exists() and diary.stat().st_size > 0 for diary in diaries):
            assert torchrun.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        torchrun.kill()
        torchrun.wait()
    ranks = [int((tmp_path / f"rank_{rank}.pid").read_text()) for rank in range(2)]
    wait_until(lambda: not any(map(is_alive, ranks)), "a rank lives on")
    assert f"ended, because its launcher, process {torchrun.pid}, has died" in (tmp_path / "said").read_text()
    assert list((tmp_path / "saved").iterdir()) == []
