"""Two jobs that were given one port never mix: one trains as if it were alone, the other is told of it."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest
from harness.forked import Forked
from harness.lost_ranks import environments
from harness.patience import PATIENCE_SECONDS, wait_until
from harness.places import ROOT
from harness.rank_pool import RankPool, free_port
from harness.tiny_runs import TINY, losses, pretrain

ENTRY = ROOT / "pretrain_zeropp_gpt.py"


def train_both(folder: Path, delay_seconds: float) -> list[tuple[float, float]]:
    """The losses of the job that trains. Fails unless each rank of the other ends with a sentence that names the rank 0 of this one."""
    folder.mkdir()
    port = free_port()
    end = folder / "end"
    flags = f"--zero-stage 3 --train-iters 1000000 --distributed-timeout-minutes 1 --kill-switch-file {end} --log-jsonl".split()
    jobs: list[list[Forked]] = []
    for number in range(2):
        of_ranks = environments(2, port, MEGATRON_ZPP_JOB_ID=f"job {number}")
        jobs.append([Forked(ENTRY, *TINY, *flags, folder / f"{number}.jsonl", environment=environment) for environment in of_ranks])
        time.sleep(delay_seconds)
    wait_until(lambda: not all(any(rank.process.is_alive() for rank in job) for job in jobs), "both jobs go on")
    second = next(number for number, job in enumerate(jobs) if not any(rank.process.is_alive() for rank in job))
    log = folder / f"{1 - second}.jsonl"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 5, "the job that goes on does not train")
    end.touch()
    first_ends, second_ends = ([rank.finished(PATIENCE_SECONDS) for rank in jobs[number]] for number in (1 - second, second))
    assert [(done.returncode, done.stderr) for done in first_ends] == [(0, ""), (0, "")]
    rank_0 = f"process {jobs[1 - second][0].process.pid} on {socket.gethostname()} (since "
    for done in second_ends:
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert rank_0 in done.stderr and f"MEGATRON_ZPP_JOB_ID=job {1 - second}), rank 0 of 2; choose another MASTER_PORT" in done.stderr
    return losses([json.loads(line) for line in log.read_text().splitlines()])


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.long)])
def test_of_two_jobs_on_one_port_one_trains_undisturbed_and_the_other_names_it(ranks: RankPool, tmp_path: Path, rounds: int) -> None:
    alone = losses(pretrain(ranks, 1, 2, "--zero-stage 3 --train-iters 5", tmp_path / "alone.jsonl"))
    for number in range(rounds):
        assert train_both(tmp_path / str(number), delay_seconds=0.1 * (number % 5))[:5] == alone
