"""The link between two nodes is cut in mid-step: every rank ends and says why, and the same command goes on from the last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.network_nodes import found_by

TIMEOUT_SECONDS = 60.0  # --distributed-timeout-minutes 1


@pytest.mark.long
def test_a_cut_link_ends_every_rank_in_time_and_the_same_command_goes_on(tmp_path: Path) -> None:
    found = found_by("harness.cut_link", tmp_path, limit_seconds=600)
    assert [code for code, _ in found["first"]] == [1] * 4
    assert found["cut_to_end_seconds"] < TIMEOUT_SECONDS
    for rank, (_, errors) in enumerate(found["first"]):
        lost = "ranks 2, 3 show" if rank < 2 else "rank 0 shows"  # rank 0 holds the store, so the other side knows of nobody else
        assert f"[Rank {rank}] ended, because {lost} no sign of life" in errors
    assert [code for code, _ in found["second"]] == [0] * 4
    iterations = [json.loads(line)["iteration"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    resumed = iterations.index(4, iterations.index(4) + 1) if iterations.count(4) == 2 else iterations.index(4)
    assert iterations[resumed:] == list(range(4, 13))
