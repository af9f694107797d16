"""Trains with NVIDIA Apex where it is installed, or where its sources are at hand, and compares losses with torch's kernels."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.commands import python, run_program
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.differences import largest_difference
from benchmarks.gpu.outcome import NotDone, Outcome
from benchmarks.gpu.place import Place, require_gpu
from megatron_zpp.ops.apex import check_apex
from testbed.session import RankPlace, Session

SOURCES_VARIABLE = "GPU_CHECK_APEX_SOURCES"
SHAPE = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 1000 --micro-batch-size 2 --mock-data "
    "--train-iters 10 --attention-dropout 0 --hidden-dropout 0 --zero-stage 3"
)
BACKENDS = {"--optimizer-backend": "amp_C", "--norm-backend": "fused_layer_norm_cuda"}
STEPS = 6
TOLERANCE = 1e-3  # of losses in fp32 after a few steps: both round each operation, in another order


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    require_gpu(place)
    with tempfile.TemporaryDirectory() as folder:
        sources = os.environ.get(SOURCES_VARIABLE)
        if sources:
            _build(time, outcome, Path(sources), Path(folder))
        for flag, extension in BACKENDS.items():
            try:
                check_apex(flag, extension, place.device.type)
            except ValueError as missing:
                outcome.omit(f"{flag} apex was not tried: {missing}; --apex-sources names a checkout that is built here")
                continue
            _compare(outcome, place, flag)
    if not outcome.measured:
        raise NotDone("NVIDIA Apex was not tried")


def _build(time: Deadline, outcome: Outcome, sources: Path, folder: Path) -> None:
    """Builds Apex into `folder`, from which it is imported afterwards."""
    environment = {**os.environ, "APEX_CPP_EXT": "1", "APEX_CUDA_EXT": "1", "MAX_JOBS": str(os.cpu_count() or 1)}
    words = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(folder), str(sources)]
    done = run_program(python(*words), time, environment)
    if done.code is None:
        outcome.ran_late(f"the end of the build of NVIDIA Apex in {sources}")
        return
    if not outcome.check(f"NVIDIA Apex in {sources} builds", holds=done.code == 0):
        outcome.say(*done.said)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _compare(outcome: Outcome, place: Place, flag: str) -> None:
    losses = {}
    for backend in ("torch", "apex"):
        session = Session(f"{SHAPE} {flag} {backend}", RankPlace.alone(place.device))
        losses[backend] = [session.step(2 * step)[0] for step in range(STEPS)]
        session.close()
    largest = largest_difference(losses["apex"], losses["torch"])
    outcome.measure(**{flag: losses})
    outcome.check(f"{flag} apex has the losses of torch's kernels within {TOLERANCE:g} (found {largest:.1e})", holds=largest <= TOLERANCE)
