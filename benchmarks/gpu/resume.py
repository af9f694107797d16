"""Saves, resumes and evaluates with the training script; losses must be those of a run that does nothing of this, bit for bit."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.entry_runs import Entry, Finished, run_entries
from benchmarks.gpu.outcome import NotDone, Outcome
from benchmarks.gpu.rank_processes import ONE_GPU_EACH, Sharing
from benchmarks.gpu.sharing import working_sharing

RANKS = 4
RUN_SECONDS = 60.0
MIDDLE, LAST = 3, 6
SHAPE = (
    "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --mock-data --num-workers 0 --bf16 "
    f"--train-iters {LAST} --micro-batch-size 2 --lr 1e-3 --lr-decay-style constant --log-interval 1 --deterministic-mode --zero-stage 3 "
    "--zero-quantized-weights --zero-quantized-gradients --distributed-timeout-minutes 1"
)
NO_EVALUATION = "--eval-iters 0"
PLAIN, EVALUATES = "does nothing else", "evaluates"
EVALUATION = f"--eval-iters 2 --eval-interval {MIDDLE}"


def run(time: Deadline, outcome: Outcome) -> None:
    if not torch.cuda.is_available():
        outcome.omit("saving from a GPU: torch finds none here; the rank ran on the CPU")
    with tempfile.TemporaryDirectory() as folder:
        check_runs(time, outcome, Path(folder), 1, ONE_GPU_EACH)
    try:
        sharing = working_sharing(time, outcome, RANKS)
    except NotDone as reason:
        outcome.omit(f"the same on {RANKS} ranks: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder:
        check_runs(time, outcome, Path(folder), RANKS, sharing)


def check_runs(time: Deadline, outcome: Outcome, folder: Path, world_size: int, sharing: Sharing) -> None:
    flags = f"{SHAPE} --ranks-per-node {min(2, world_size)}"
    saves = {"saves": "", "saves beside training": "--async-save"}
    entries = [Entry(PLAIN, f"{flags} {NO_EVALUATION}"), Entry(EVALUATES, f"{flags} {EVALUATION}")]
    for name, more in saves.items():
        saved = f"--save {_folder(folder, name)} --save-interval {MIDDLE} {more}"
        entries.append(Entry(name, f"{flags} {EVALUATION} {saved}"))
        entries.append(Entry(f"{name}, then resumes", f"{flags} {EVALUATION} --load {_folder(folder, name)} --ckpt-step {MIDDLE}"))
    found: dict[str, Finished] = {}
    for finished in run_entries(entries, world_size, sharing, time, run_seconds=RUN_SECONDS):
        if finished.is_late:
            outcome.say(f"the run that {finished.entry.name} does not end within {RUN_SECONDS:.0f} s", *finished.errors)
            continue
        found[finished.entry.name] = finished
        _compare(outcome, finished, found, f"{world_size} ranks" if world_size > 1 else "one rank")
    for entry in entries:
        if entry.name not in found:
            outcome.ran_late(f"run '{entry.name}' of {world_size} ranks")
    shutil.rmtree(folder, ignore_errors=True)


def _folder(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "_")


def _compare(outcome: Outcome, finished: Finished, found: dict[str, Finished], ranks: str) -> None:
    name = finished.entry.name
    if not outcome.check(f"{ranks}: the run that {name} ends well", holds=not finished.errors):
        outcome.say(*finished.errors)
        return
    resumes = "resumes" in name
    if name != PLAIN and PLAIN in found:
        expected = found[PLAIN].losses[MIDDLE if resumes else 0 :]
        outcome.check(f"{ranks}: the run that {name} has the losses of the plain run", holds=finished.losses == expected != [])
    if name not in (PLAIN, EVALUATES) and EVALUATES in found:
        expected_validations = found[EVALUATES].validation_losses[1 if resumes else 0 :]
        statement = f"{ranks}: the run that {name} has the validation losses of the one that only evaluates"
        outcome.check(statement, holds=finished.validation_losses == expected_validations != [])
