"""The link between two nodes is cut in mid-step: every rank ends and says why, and the same command goes on from the last checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.places import importing

from testbed.sandbox import CannotIsolate, isolating_command

TIMEOUT_SECONDS = 60.0  # --distributed-timeout-minutes 1


@pytest.mark.long
def test_a_cut_link_ends_every_rank_in_time_and_the_same_command_goes_on(tmp_path: Path) -> None:
    try:
        isolating_command()
    except CannotIsolate as error:
        pytest.skip(str(error))
    environment = importing(os.environ)
    finished = subprocess.run(
        [sys.executable, "-m", "harness.cut_link", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert [code for code, _ in found["first"]] == [1] * 4
    assert found["cut_to_end_seconds"] < TIMEOUT_SECONDS
    for rank, (_, errors) in enumerate(found["first"]):
        lost = "ranks 2, 3 show" if rank < 2 else "rank 0 shows"  # rank 0 holds the store, so the other side knows of nobody else
        assert f"[Rank {rank}] ended, because {lost} no sign of life" in errors
    assert [code for code, _ in found["second"]] == [0] * 4
    iterations = [json.loads(line)["iteration"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    resumed = iterations.index(4, iterations.index(4) + 1) if iterations.count(4) == 2 else iterations.index(4)
    assert iterations[resumed:] == list(range(4, 13))
