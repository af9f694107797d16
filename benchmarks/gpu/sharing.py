"""Finds out how the ranks of a world can share the GPUs of this machine over NCCL, once for all parts of a check."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.files import read_json, write_json
from benchmarks.gpu.outcome import NotDone, Outcome
from benchmarks.gpu.rank_processes import (
    FOUND_VARIABLE,
    HOST_IDS,
    MULTI_RANK,
    ONE_GPU_EACH,
    Ended,
    Sharing,
    in_words,
    ran_out_of_time,
    run_ranks,
)

PROGRAM = ("-m", "benchmarks.gpu.smoke_program")
SMOKE_SECONDS = 60.0
REFUSAL = "NCCL WARN"  # in a line in which NCCL says why


def working_sharing(time: Deadline, outcome: Outcome, world_size: int) -> Sharing:
    """The first way in which so many ranks exchange numbers. Raises NotDone if there is none, with what each has said.

    If ranks have not ended in time, that is late, too: this machine may only be slow.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ways = {way.name: way for way in ([ONE_GPU_EACH] if gpus == 0 or gpus >= world_size else [HOST_IDS, MULTI_RANK])}
    if gpus == 0:
        outcome.omit("NCCL: torch finds no GPU here; the ranks ran on the CPU over gloo")
    found = _found(time, list(ways.values()), world_size)
    if found["way"] is None:
        outcome.say(*found["said"])
        if found["is_late"]:
            outcome.ran_late(f"an exchange of numbers among {world_size} ranks")
        raise NotDone(f"{world_size} ranks did not exchange numbers over NCCL on the GPUs of this machine: {found['why']}")
    way = ways[found["way"]]
    outcome.say(f"{world_size} ranks share {gpus} GPUs: {way.name}")
    outcome.measure(sharing=way.name)
    return way


def _found(time: Deadline, ways: list[Sharing], world_size: int) -> dict[str, Any]:
    """The name of the first way that works, and what the ways before it have said. Tries them unless another part has, or is doing so.

    Then its report has what they said.
    """
    file = os.environ.get(FOUND_VARIABLE)
    if file is None:
        return _search(time, ways, world_size)
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_json(Path(file))
        if known is not None and known["ranks"] == world_size:
            return {**known, "said": []}
        had_time = time.has(len(ways) * SMOKE_SECONDS)
        found = _search(time, ways, world_size)
        if had_time or not found["is_late"]:  # otherwise a later part may have more time
            write_json(Path(file), found)
        return found


def _search(time: Deadline, ways: list[Sharing], world_size: int) -> dict[str, Any]:
    said: list[str] = []
    is_late = False
    for way in ways:
        ended = _tried(time, way, world_size)
        if all(end.code == 0 for end in ended):
            return {"ranks": world_size, "way": way.name, "is_late": False, "said": said, "why": ""}
        is_late |= ran_out_of_time(ended)
        said += [f"{way.name}:", *in_words(ended)]
    why = next((line for line in said if REFUSAL in line), "the first of these parts has what they said")
    return {"ranks": world_size, "way": None, "is_late": is_late, "said": said, "why": why}


def _tried(time: Deadline, way: Sharing, world_size: int) -> list[Ended]:
    """How ranks have ended that exchange numbers in this way."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(PROGRAM, world_size, way, Path(folder), Deadline(min(SMOKE_SECONDS, time.remaining_seconds())))
