"""An optimizer and kept inputs on the host of the GPU: losses and memory beside those on the GPU, and copies beside computation."""

from __future__ import annotations

import gc
import statistics
import time as clock
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import kept_on_host
from benchmarks.gpu.beside import report_overlap, seconds_of
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.device_errors import attempt
from benchmarks.gpu.differences import largest_difference
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place, load_kernels
from megatron_zpp.comm.code import SliceShape
from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.host_link import HostLink
from megatron_zpp.comm.streams import CudaStreams
from megatron_zpp.monitor.memory import read_memory
from megatron_zpp.training.host_threads import own_cores
from megatron_zpp.training.plan.kinds import MAIN_WEIGHTS, MIRRORS, MOMENTS, PINNED
from megatron_zpp.zero.engine import StateBytes
from testbed.session import RankPlace, Session

GPU_SHAPE = "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 2 --vocab-size 50257"
CPU_SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --vocab-size 100"
FLAGS = "--bf16 --mock-data --train-iters 100 --attention-dropout 0 --hidden-dropout 0"
ROWS = {
    "stage 2": "--zero-stage 2",
    "stage 3": "--zero-stage 3",
}
OFFLOAD = "--optimizer-cpu-offload"
STEPS, CASE_SECONDS = 5, 12.0
LARGEST_DIFFERENCE = 2e-3  # of a loss: one rounding of a bf16 weight is 2^-9 of it, and few weights round otherwise
PLAN_SLACK = 0.05  # of the plan; activations are an estimate
COPIED_BYTES, ROUNDS = 1 << 28, 8
LEAST_RATE = 5e9  # bytes per second; copies of memory that is not pinned reach less on most machines
PRODUCT_SIZE = 8192


@dataclass(frozen=True)
class Trained:
    """What a few steps had. device_bytes, host_bytes: of states, at the end of backward. peak_bytes, planned_bytes: of the device.

    update_seconds: of the updates on the host that wait for the next forward, alone.
    """

    losses: list[float]
    seconds: float
    device_bytes: int
    host_bytes: int
    peak_bytes: int
    planned_bytes: int
    update_seconds: float


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    load_kernels(place, outcome)
    if place.is_gpu:
        torch.set_num_threads(len(own_cores()))
        outcome.say(f"AdamW on the host has {torch.get_num_threads()} threads")
        attempt(outcome, "the host link", partial(measure_link, outcome, place))
        attempt(outcome, "copies of kept inputs", partial(kept_on_host.measure_copies, outcome, place))
    else:
        outcome.omit("rates of the host link, and copies beside computation: torch finds no GPU here")
    for name, row in ROWS.items():
        if time.has(CASE_SECONDS):
            attempt(outcome, name, partial(compare, outcome, place, name, row))
        else:
            outcome.ran_late(name)
    if time.has(CASE_SECONDS):
        attempt(outcome, "kept inputs", partial(compare_kept_inputs, outcome, place))
    else:
        outcome.ran_late("kept inputs")


def compare_kept_inputs(outcome: Outcome, place: Place) -> None:
    """Trains a few steps with inputs of recomputed chunks on the device, in an arena and on the host."""

    def peak_of(flags: str) -> kept_on_host.Peak:
        trained = train(outcome, place, f"{flags} {FLAGS}")
        return kept_on_host.Peak(trained.peak_bytes, trained.planned_bytes, trained.losses)

    kept_on_host.check_peaks(outcome, place, peak_of, LARGEST_DIFFERENCE if place.is_gpu else 0.0)


def compare(outcome: Outcome, place: Place, name: str, row: str) -> None:
    """Trains a few steps without and with offload."""
    shape = CPU_SHAPE if place.is_tiny else GPU_SHAPE
    plain = train(outcome, place, f"{shape} {FLAGS} {row}")
    offloaded = train(outcome, place, f"{shape} {FLAGS} {row} {OFFLOAD}")
    outcome.measure(**{name: {"plain": vars(plain), "offloaded": vars(offloaded)}})
    largest = largest_difference(offloaded.losses, plain.losses)
    outcome.check(
        f"{name}: {STEPS} losses with and without offload differ by at most {largest:.1e} of themselves",
        holds=largest <= (LARGEST_DIFFERENCE if place.is_gpu else 0.0),
    )
    outcome.say(
        f"    {offloaded.seconds * 1e3:.1f} ms per step with offload, {plain.seconds * 1e3:.1f} without; "
        f"{offloaded.update_seconds * 1e3:.1f} ms for the updates alone that run beside a forward"
    )
    outcome.say(
        f"    states on the device {offloaded.device_bytes:,} bytes instead of {plain.device_bytes:,}, on the host {offloaded.host_bytes:,}"
    )


def train(outcome: Outcome, place: Place, flags: str) -> Trained:
    """Checks bytes against the plan on the way."""
    gc.collect()  # the model before needs no memory any more
    if place.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place.device)
    session = Session(flags, RankPlace.alone(place.device))
    losses, seconds = [], []
    states = StateBytes(0, 0)
    for step in range(STEPS):
        start = clock.perf_counter()
        loss = session.forward_backward(step)
        states = session.engine.state_bytes()
        session.engine.update(learning_rate=1e-4)
        place.synchronize()
        seconds.append(clock.perf_counter() - start)
        losses.append(float(loss.item()) / session.microbatches)
    update_seconds = seconds_of(place, session.engine.finish_updates)
    on_host = session.need.tensors.on_host
    planned_states = StateBytes(session.need.states, sum(on_host.get(kind, 0) for kind in (MAIN_WEIGHTS, MOMENTS, MIRRORS)))
    held = states if place.is_gpu else StateBytes(states.device + states.host, 0)  # a plan of a CPU has one memory
    outcome.check(
        f"states hold {states.device:,} bytes on the device and {states.host:,} on the host as planned", holds=held == planned_states
    )
    peak, planned = read_memory(place.device).max_allocated_bytes, session.need.beside(session.need.device).total
    if place.is_gpu:
        pinned = session.engine.links.host_link.pinned_bytes
        outcome.check(f"{pinned:,} bytes of the host are pinned as planned", holds=pinned == on_host.get(PINNED, 0))
        outcome.check(
            f"the peak of {peak:,} bytes is at most {1 + PLAN_SLACK:.0%} of the planned {planned:,}",
            holds=peak <= (1 + PLAN_SLACK) * planned,
        )
    session.close()
    return Trained(losses, statistics.median(seconds), states.device, states.host, peak, planned, update_seconds)


def measure_link(outcome: Outcome, place: Place) -> None:
    """Times copies in each direction, and both beside matrix products."""
    streams = CudaStreams(place.device)
    link, lane = HostLink(streams), streams.make(is_urgent=True)
    values = torch.ones(COPIED_BYTES // 4, device=place.device)
    payload = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=place.device)
    (arrival,) = link.arrivals([Regions.of(values, SliceShape(values.numel(), 0))])
    link.reserve(COPIED_BYTES)
    matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=place.device, dtype=torch.bfloat16)

    def down() -> None:
        arrival.start()
        arrival.wait()

    def up() -> None:
        with streams.entered(lane):
            link.encode(_leave, payload)

    def copy() -> None:
        for _ in range(ROUNDS):
            up()
            down()

    def multiply() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    products = 1
    for call in (down, up, multiply):
        seconds_of(place, call)  # warms up
    rates = {name: COPIED_BYTES / min(seconds_of(place, call) for _ in range(ROUNDS)) for name, call in {"down": down, "up": up}.items()}
    for name, rate in rates.items():
        outcome.check(f"the host link copies {rate / 1e9:.1f} GB/s {name}", holds=rate >= LEAST_RATE)
    copying = seconds_of(place, copy)
    products = max(1, round(copying / seconds_of(place, multiply)))
    multiplying = seconds_of(place, multiply)

    def both() -> None:
        multiply()
        copy()

    together = seconds_of(place, both)
    report_overlap(outcome, copying, multiplying, together)
    outcome.measure(rates=rates, copying_seconds=copying, multiplying_seconds=multiplying, together_seconds=together)


def _leave(written: Tensor) -> None:
    """Encodes nothing: only the copy is timed."""
