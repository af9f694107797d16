"""Finds out how the ranks of a world can share the GPUs of this machine over NCCL."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from gpu.deadline import Deadline
from gpu.outcome import NotDone, Outcome
from gpu.rank_processes import HOST_IDS, MULTI_RANK, ONE_GPU_EACH, Sharing, in_words, run_ranks

PROGRAM = str(Path(__file__).with_name("smoke_program.py"))
SMOKE_SECONDS = 60.0


def working_sharing(time: Deadline, outcome: Outcome, world_size: int) -> Sharing:
    """The first way in which so many ranks exchange numbers. Raises NotDone if there is none, with what each has said."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ways = [ONE_GPU_EACH] if gpus == 0 or gpus >= world_size else [HOST_IDS, MULTI_RANK]
    if gpus == 0:
        outcome.omit("NCCL: torch finds no GPU here; the ranks ran on the CPU over gloo")
    said: list[str] = []
    for way in ways:
        refusal = _refusal(time, way, world_size)
        if refusal is None:
            outcome.say(f"{world_size} ranks share {gpus} GPUs: {way.name}")
            outcome.measure(sharing=way.name)
            return way
        said += [f"{way.name}:", *refusal]
    raise NotDone("\n".join([f"{world_size} ranks cannot share the GPUs of this machine over NCCL", *said]))


def _refusal(time: Deadline, way: Sharing, world_size: int) -> list[str] | None:
    """What the ranks say if they do not exchange numbers in this way; None if they do."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks([PROGRAM], world_size, way, Path(folder), Deadline(min(SMOKE_SECONDS, time.remaining_seconds())))
    return None if all(end.code == 0 for end in ended) else in_words(ended)
