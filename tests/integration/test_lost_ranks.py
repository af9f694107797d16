"""A rank that is killed or stopped in any phase of a run, rank 0 too, ends the others in time, and they name it and nobody else."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from harness.lost_rank import POINTS
from harness.lost_ranks import TIMEOUT_SECONDS, End, Loss, ends_after

JOINING = ("join", "inviting or claiming")
NAMED = re.compile(r"ranks? ([\d, ]+) shows? no sign of life")
START_SECONDS = 30.0  # of a loaded machine: each rank counts the time of joining from its own start


def check(loss: Loss, ends: list[End]) -> None:
    for end in ends:
        place = f"{loss}: {end}"
        if loss.where in JOINING:
            sentence = (
                rf"error: rank {end.rank} .*rank 0 at MASTER_ADDR"
                if loss.rank == 0
                else rf"error: .*for rank {loss.rank} of {loss.world_size};"
            )
            assert end.code == 2 and re.search(sentence, end.errors), place
            assert len(end.errors.splitlines()) == 1, place
            assert end.seconds < TIMEOUT_SECONDS + START_SECONDS, place
        else:
            assert end.code == 1 and "ended, because rank" in end.errors, place
            assert set(NAMED.findall(end.errors)) == {str(loss.rank)} and "(noticed by rank" in end.errors, place
            assert end.seconds < TIMEOUT_SECONDS, place
        if loss.where in ("connecting", "leaving"):
            assert "Traceback" not in end.errors and len(end.errors.splitlines()) == 1, place


def test_ranks_that_are_killed_in_a_step_in_a_sum_or_exchange_or_while_all_leave_are_named_and_rank_0_as_any_other(tmp_path: Path) -> None:
    losses = [
        Loss("first step", signal.SIGKILL, 0, 4, nodes=2),
        Loss("leaving", signal.SIGKILL, 1, 2),
        Loss("after the roll call", signal.SIGKILL, 0),
        Loss("tensor sum", signal.SIGKILL, 1, 2, tensor_ranks=2),
        Loss("exchange", signal.SIGKILL, 1, 2, context_ranks=2),
    ]
    for loss, ends in ends_after(losses, tmp_path).items():
        check(loss, ends)


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize("where", POINTS)
def test_a_rank_that_is_lost_anywhere_ends_the_others_in_time_and_is_named(where: str, how: signal.Signals, tmp_path: Path) -> None:
    sizes = {"tensor sum": (4, 2), "exchange": (4, 1, 2)}.get(where, (3, 1))
    for loss, ends in ends_after([Loss(where, how, 0, *sizes), Loss(where, how, 2, *sizes)], tmp_path).items():
        check(loss, ends)
