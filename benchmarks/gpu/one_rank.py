"""Compares a world of one with plain torch, losses and gradients, and watches memory over 200 steps."""

from __future__ import annotations

import math
from itertools import chain

import torch

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.differences import largest_difference
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place, load_kernels
from benchmarks.gpu.plain_run import PlainRun, engine_gradients
from megatron_zpp.training.startup_checks import use_deterministic_kernels
from testbed.session import RankPlace, Session

SHAPE = (
    "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --micro-batch-size 2 --mock-data "
    "--train-iters 10 --attention-dropout 0 --loss-chunk-tokens 0"
)
COMPARED_STEPS = 10
FLAT_STEPS, SETTLED_STEPS, TINY_STEPS = 200, 20, 24
# Both compute with the same kernels from the same values; what may differ is the order of a few sums. One rounding is 6e-8 in fp32 and
# 4e-3 in bf16, in which gradients are stored; ten steps of Adam, which divides by the root of small moments, carry it on.
TOLERANCES = {"fp32": ("", 1e-5, 1e-4), "bf16": ("--bf16", 1e-2, 2e-2)}
STAGES = (0, 1, 2, 3)


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    load_kernels(place, outcome)
    if place.is_gpu:
        use_deterministic_kernels()
    for name, (flags, of_gradients, of_losses) in TOLERANCES.items():
        for stage in STAGES:
            if not time.has(4.0):
                outcome.ran_late(f"stage {stage} in {name} against plain torch")
                continue
            _compare(outcome, place, f"stage {stage}, {name}", f"{SHAPE} {flags} --zero-stage {stage}", of_gradients, of_losses)
    _check_memory(time, outcome, place)


def _compare(outcome: Outcome, place: Place, name: str, flags: str, of_gradients: float, of_losses: float) -> None:
    session = Session(flags, RankPlace.alone(place.device))
    plain = PlainRun(session)
    session.forward_backward(0)
    plain.gradients(0)
    differences = {parameter: _relative_difference(own, plain.main[parameter].grad) for parameter, own in engine_gradients(session).items()}
    worst = max(differences, key=lambda parameter: differences[parameter])
    equal = sum(difference == 0 for difference in differences.values())
    outcome.check(
        f"{name}: gradients are those of plain torch within {of_gradients:g} ({equal} of {len(differences)} to the bit; "
        f"{worst} differs by {differences[worst]:.1e})",
        holds=len(differences) == len(plain.main) and differences[worst] <= of_gradients,
    )
    session.close()
    session = Session(flags, RankPlace.alone(place.device))
    pairs = [(session.step(step), plain.step(step)) for step in range(COMPARED_STEPS)]
    session.close()
    own, theirs = zip(*pairs, strict=True)
    largest = largest_difference(chain.from_iterable(own), chain.from_iterable(theirs))
    outcome.measure(**{name: {"gradients": differences, "losses_and_norms": pairs}})
    outcome.check(
        f"{name}: losses and norms of {COMPARED_STEPS} steps are those of plain torch within {of_losses:g} (found {largest:.1e})",
        holds=largest <= of_losses,
    )


def _relative_difference(own: torch.Tensor, theirs: torch.Tensor | None) -> float:
    """The norm of the difference as a share of the norm of `theirs`; inf if a value is not finite."""
    if theirs is None:
        return math.inf
    reference = theirs.flatten().double()
    norm = float(reference.norm().item())
    difference = float((own.double() - reference).norm().item())
    share = difference if norm == 0 else difference / norm
    return share if math.isfinite(share) else math.inf


def _check_memory(time: Deadline, outcome: Outcome, place: Place) -> None:
    session = Session(f"{SHAPE} --bf16 --zero-stage 3", RankPlace.alone(place.device))
    readings: list[tuple[int, int]] = []
    steps = TINY_STEPS if place.is_tiny else FLAT_STEPS
    for step in range(steps):
        if not time.has(1.0):
            outcome.ran_late(f"memory after {step} of {steps} steps")
            return
        session.step(step)
        if place.is_gpu and step >= SETTLED_STEPS:
            readings.append((torch.cuda.memory_allocated(place.device), torch.cuda.memory_reserved(place.device)))
    session.close()
    if not place.is_gpu:
        outcome.omit("memory over 200 steps: a CPU does not count allocations")
        return
    allocated, reserved = ({reading[kind] for reading in readings} for kind in (0, 1))
    outcome.measure(allocated_bytes=sorted(allocated), reserved_bytes=sorted(reserved))
    outcome.check(f"allocated memory is the same after every step from {SETTLED_STEPS} to {steps}: {allocated}", holds=len(allocated) == 1)
    outcome.check(f"reserved memory is the same after every step from {SETTLED_STEPS} to {steps}: {reserved}", holds=len(reserved) == 1)
