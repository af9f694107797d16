"""The tensor link over NCCL: its first messages, the bits of its sums, and how much of a sum hides behind a matrix product.

Ranks are processes. On a machine with fewer GPUs than ranks they share them, and then times mean nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.files import read_json
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.rank_processes import Sharing, in_words, ran_out_of_time, run_ranks
from benchmarks.gpu.sharing import working_sharing

RANKS = 4  # 2 groups of 2
MOST_EXPOSED = 0.5  # of the shorter of a sum and a product, if they run beside each other


def run(time: Deadline, outcome: Outcome) -> None:
    measure(time, outcome, working_sharing(time, outcome, RANKS), is_timed=torch.cuda.is_available() and torch.cuda.device_count() >= RANKS)


def measure(time: Deadline, outcome: Outcome, sharing: Sharing, *, is_timed: bool) -> None:
    """is_timed: whether each rank has a GPU of its own, so that times mean something."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "found.json"
        ended = run_ranks(["-m", "benchmarks.gpu.tensor_program", str(file)], RANKS, sharing, folder, time)
        if ran_out_of_time(ended):
            outcome.ran_late(f"the end of {RANKS} ranks that use their tensor links")
            return
        if not outcome.check(f"{RANKS} ranks use their tensor links", holds=all(end.code == 0 for end in ended)):
            outcome.say(*in_words(ended))
            return
        report(outcome, read_json(file), is_timed=is_timed)


def report(outcome: Outcome, found: dict[str, Any], *, is_timed: bool) -> None:
    """found: what tensor_program has written."""
    outcome.measure(**found)
    wrong = found["wrong"]
    outcome.check(
        f"{found['compared']} sums and gathers have the bits of adding rank after rank in fp32"
        + "".join(f"; not {name}" for name in wrong),
        holds=not wrong,
    )
    seconds = found["seconds"]
    outcome.say("    " + ", ".join(f"{name} {value * 1e3:.3f} ms" for name, value in seconds.items()))
    if not is_timed:
        outcome.omit("sums beside matrix products: ranks share a GPU or have none, so times mean nothing")
        return
    longer, shorter = max(seconds["product"], seconds["sum"]), min(seconds["product"], seconds["sum"])
    exposed = (seconds["beside each other"] - longer) / shorter
    outcome.check(f"beside each other, {exposed:.0%} of the shorter of sum and product is not hidden", holds=exposed < MOST_EXPOSED)
