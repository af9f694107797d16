"""Trains a GPT of about 1 billion parameters in a world of one: speed, the parts of a step's time, stalls, and memory against the plan."""

from __future__ import annotations

import gc
import statistics
import time as clock
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.device_errors import attempt
from benchmarks.gpu.kernel_kinds import ATTENTION, FUSED_LOSS, MATRIX, NAMES, kind_of
from benchmarks.gpu.outcome import NotDone, Outcome
from benchmarks.gpu.place import Place, load_kernels
from benchmarks.gpu.stalls import MeasuredStreams
from megatron_zpp.comm.streams import streams_of
from megatron_zpp.model.flops import hardware_flops, model_flops, parameter_count
from megatron_zpp.monitor.memory import read_memory
from megatron_zpp.monitor.observer import StepObserver
from megatron_zpp.monitor.timers import NEVER_RAN, TIMER_NAMES, Timers, clock_of
from megatron_zpp.ops.extension import has_loss_kernels_for
from megatron_zpp.training.hardware import peak_teraflops
from testbed.session import RankPlace, Session

GPU_SHAPE = "--num-layers 18 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4 --vocab-size 50257"
CPU_SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --vocab-size 500"
FLAGS = "--bf16 --zero-stage 3 --mock-data --train-iters 100 --attention-dropout 0 --hidden-dropout 0"
MICROBATCHES, MICROBATCHES_SECONDS = 8, 15.0
WARMUP_STEPS, TIMED_STEPS, PROFILED_STEPS, SHORT_STEPS = 3, 8, 3, 4
NAMED_KERNELS = 14
PLAN_SLACK = 0.05  # of the plan; activations are an estimate
RESERVE_BYTES = 6 * 2**30  # beyond the plan: CUDA's context, workspaces of cuBLAS, what the allocator cannot use
MATRIX_SIZE, MATRIX_ROUNDS = 8192, 10


@dataclass(frozen=True)
class Variant:
    """The same model with other flags. seconds: below which it is not begun. may_not_fit: whether it needs more memory than the model."""

    name: str
    flags: str
    seconds: float
    may_not_fit: bool = False


# In a world of one, stage 3 copies all weights twice per micro-batch to save 2 bytes per parameter, and the loss in chunks computes logits
# twice to save their memory. The first variant does neither.
VARIANTS = (
    Variant("weights kept, whole logits", "--zero-stage 1 --loss-chunk-tokens 0", 15.0, may_not_fit=True),
    Variant("attention by flash", "--attention-backend flash", 15.0),  # beside what auto takes, which may be cuDNN
    Variant("--compile", "--compile", 60.0),
)


@dataclass
class Steps:
    """What timed steps took, one value per step. host_seconds: until forward and backward were enqueued. losses: with those of warm-up."""

    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    device_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    load_kernels(place, outcome)
    if not place.is_gpu:
        outcome.omit("a GPT of 1 billion parameters: torch finds no GPU here; a tiny one was trained on the CPU instead")
    shape = CPU_SHAPE if place.is_tiny else GPU_SHAPE
    attempt(outcome, "training", partial(_measure_all, time, outcome, place, f"{shape} {FLAGS}"))
    for variant in VARIANTS:
        if place.is_gpu:
            gc.collect()  # the next model needs the memory of this one
            torch.cuda.empty_cache()
        attempt(outcome, variant.name, partial(_time_if_it_fits, time, outcome, place, f"{shape} {FLAGS}", variant))


def _measure_all(time: Deadline, outcome: Outcome, place: Place, flags: str) -> None:
    """Everything that is measured, with one model; of the variants only the speed."""
    timers, streams = Timers(2, clock_of(place.device)), streams_of(place.device)
    measured = None if streams is None else MeasuredStreams(streams)
    session = Session(flags, RankPlace.alone(place.device, measured), StepObserver((timers.running,), ()))
    steps = time_steps(session, place, WARMUP_STEPS, TIMED_STEPS, timers)
    _report_speed(outcome, session, steps, place, "1 micro-batch")
    _report_phases(outcome, timers)
    attempt(outcome, "memory", partial(_check_memory, outcome, session, place))
    attempt(outcome, "waits of the host", partial(_count_syncs, outcome, session, place))
    attempt(outcome, "the profile", partial(_report_profile, outcome, session, place, steps))
    if measured is None:
        outcome.omit("stalls: there are no streams here")
    else:
        attempt(outcome, "stalls", partial(report_stalls, outcome, session, measured, place, SHORT_STEPS))
    attempt(outcome, f"{MICROBATCHES} micro-batches", partial(_time_microbatches, time, outcome, session, place))
    session.close()


def _time_microbatches(time: Deadline, outcome: Outcome, session: Session, place: Place, variant: str = "") -> None:
    name = f"{MICROBATCHES} micro-batches{variant}"
    if not time.has(MICROBATCHES_SECONDS):
        outcome.ran_late(name)
        return
    session.microbatches = MICROBATCHES
    _report_speed(outcome, session, time_steps(session, place, 1, SHORT_STEPS), place, name)


def time_steps(session: Session, place: Place, warmup: int, timed: int, timers: Timers | None = None) -> Steps:
    """Times steps on host and device; timers holds the phases of the timed ones afterwards."""
    steps, marks = Steps(), clock_of(place.device)
    for step in range(warmup + timed):
        if step == warmup and timers is not None:
            place.synchronize()
            timers.take(TIMER_NAMES)
        place.synchronize()
        start, first = clock.perf_counter(), marks.mark()
        loss_sum = session.forward_backward(2 * step)
        host, second = clock.perf_counter() - start, marks.mark()
        session.engine.update(learning_rate=1e-4, weight_decay=0.0)
        place.synchronize()
        whole = clock.perf_counter() - start
        steps.losses.append(float(loss_sum.item()) / session.microbatches)
        if step >= warmup:
            steps.seconds.append(whole)
            steps.host_seconds.append(host)
            steps.device_seconds.append(marks.seconds(first, second))
    return steps


def _report_speed(outcome: Outcome, session: Session, steps: Steps, place: Place, name: str) -> None:
    model, samples = session.config.model, session.microbatches * session.config.training.micro_batch_size
    parameters = parameter_count(model, session.padded_vocab)
    flops = model_flops(model, session.padded_vocab, samples)
    hardware = hardware_flops(model, session.padded_vocab, samples, micro_batch_size=session.config.training.micro_batch_size)
    teraflops, of_hardware = (some / steps.median / 1e12 for some in (flops, hardware))
    losses = steps.losses
    outcome.check(
        f"{parameters / 1e9:.3f} billion parameters train, {name}: loss {losses[0]:.3f} to {losses[-1]:.3f}", holds=losses[-1] < losses[0]
    )
    outcome.say(
        f"{name}: {steps.median * 1e3:.1f} ms per step (median; {min(steps.seconds) * 1e3:.1f} to {max(steps.seconds) * 1e3:.1f})",
        f"    {teraflops:.1f} TFLOP/s as Megatron-LM counts (model FLOPs), {of_hardware:.1f} as Megatron-DeepSpeed does (hardware FLOPs)",
        f"    forward and backward: {statistics.median(steps.host_seconds) * 1e3:.1f} ms until the host had enqueued them, "
        f"{statistics.median(steps.device_seconds) * 1e3:.1f} ms on the device",
    )
    measured: dict[str, Any] = {
        "parameters": parameters,
        "step_seconds": steps.seconds,
        "host_seconds": steps.host_seconds,
        "device_seconds": steps.device_seconds,
        "model_teraflops_per_second": teraflops,
        "hardware_teraflops_per_second": of_hardware,
        "losses": losses,
    }
    if place.is_gpu:
        peak, products = peak_teraflops(torch.cuda.get_device_name(place.device)), _matrix_teraflops(place)
        measured["mfu_of_products"] = teraflops / products
        outcome.say(f"    {teraflops / products:.1%} of the {products:.0f} TFLOP/s of large matrix products on this GPU")
        if peak is not None:
            measured["mfu"] = teraflops / peak
            outcome.say(f"    MFU {teraflops / peak:.1%} of {peak:.0f} TFLOP/s")
    outcome.measure(**{name: measured})


def _matrix_teraflops(place: Place) -> float:
    """TFLOP/s of bf16 products of square matrices of random values."""
    one, other = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    marks = clock_of(place.device)
    for _ in range(3):
        product = one @ other
    first = marks.mark()
    for _ in range(MATRIX_ROUNDS):
        torch.mm(one, other, out=product)
    return MATRIX_ROUNDS * 2 * MATRIX_SIZE**3 / marks.seconds(first, marks.mark()) / 1e12


def _report_phases(outcome: Outcome, timers: Timers) -> None:
    """The parts of a step on the stream of computation, by the run's own timers."""
    phases = {
        name: seconds / TIMED_STEPS for name, seconds in zip(TIMER_NAMES, timers.take(TIMER_NAMES), strict=True) if seconds != NEVER_RAN
    }
    outcome.measure(seconds_by_phase=phases)
    outcome.say(*(f"    {seconds * 1e3:8.2f} ms  {name}" for name, seconds in phases.items()))


def _check_memory(outcome: Outcome, session: Session, place: Place) -> None:
    session.forward_backward(0)
    states, planned_states = session.engine.state_bytes().device, session.need.states
    session.engine.update(learning_rate=1e-4)
    outcome.check(f"model states hold {states:,} bytes as planned ({planned_states:,})", holds=states == planned_states)
    peak = read_memory(place.device).max_allocated_bytes
    planned = session.need.beside(session.need.device).total  # what torch's allocator gives
    outcome.measure(model_state_bytes=states, planned_total_bytes=planned, peak_bytes=peak, plan=str(session.need))
    if not place.is_gpu:
        return
    place.synchronize()
    used = torch.cuda.get_device_properties(place.device).total_memory - place.free_bytes()
    outcome.measure(used_bytes=used, reserved_bytes=torch.cuda.max_memory_reserved(place.device))
    gib = 2**30
    outcome.check(
        f"the peak of allocated memory, {peak / gib:.2f} GiB, is at most {1 + PLAN_SLACK:.0%} of the planned {planned / gib:.2f} GiB",
        holds=peak <= (1 + PLAN_SLACK) * planned,
    )
    outcome.check(
        f"the memory really used, {used / gib:.2f} GiB, is at most {RESERVE_BYTES / gib:.0f} GiB above the plan",
        holds=used <= planned + RESERVE_BYTES,
    )


def _count_syncs(outcome: Outcome, session: Session, place: Place) -> None:
    """Counts how often the host waits for the device in a step, by line."""
    if not place.is_gpu:
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session.forward_backward(0)
            before_update = len(_syncs(caught))
            session.engine.update(learning_rate=1e-4)
            places = _syncs(caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    outcome.measure(syncs_in_forward_and_backward=before_update, syncs_in_update=len(places) - before_update, syncs=Counter(places))
    outcome.say(
        f"the host waits for the device {before_update} times in forward and backward, {len(places) - before_update} times in the update",
        *(f"    {count} x {where}" for where, count in Counter(places).most_common()),
    )


def _syncs(caught: list[warnings.WarningMessage]) -> list[str]:
    return [f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchronizing" in str(one.message).lower()]


def _report_profile(outcome: Outcome, session: Session, place: Place, steps: Steps) -> None:
    """Seconds per step by kind of kernel, the longest kernels, and the kernels per unit."""
    with profile(activities=[ProfilerActivity.CUDA if place.is_gpu else ProfilerActivity.CPU]) as profiled:
        for step in range(PROFILED_STEPS):
            session.step(step)
        place.synchronize()
    events = device_events(profiled, place)
    seconds = {event.key: _self_microseconds(event, place) / PROFILED_STEPS / 1e6 for event in events}
    kinds = dict.fromkeys(NAMES, 0.0)
    for name, own in seconds.items():
        kinds[kind_of(name)] += own
    launches = sum(event.count for event in events) / PROFILED_STEPS
    units = len(session.engine.units)
    outside = 1 - (kinds[MATRIX] + kinds[ATTENTION]) / steps.median
    outcome.say(
        *(f"    {own * 1e3:8.2f} ms  {kind}" for kind, own in sorted(kinds.items(), key=lambda item: -item[1]) if own > 0),
        f"{outside:.1%} of the step is outside matrix products and attention; "
        f"the device is busy for {sum(kinds.values()) / steps.median:.1%}",
        f"{launches:.0f} kernels and copies per step, {launches / units:.0f} per unit",
        *(f"    {own * 1e3:8.2f} ms  {name[:110]}" for name, own in sorted(seconds.items(), key=lambda item: -item[1])[:NAMED_KERNELS]),
    )
    if place.is_gpu and has_loss_kernels_for("cuda"):
        outcome.check("the loss runs on its kernels", holds=kinds[FUSED_LOSS] > 0)
    outcome.measure(
        seconds_by_kind=kinds, share_outside_matrix_products=outside, launches_per_step=launches, launches_per_unit=launches / units
    )


def device_events(profiled: profile, place: Place) -> list[Any]:
    """What ran on the device, by name: kernels and copies, without the ranges that programs have named; on a CPU operators."""
    events: list[Any] = list(profiled.key_averages())
    if not place.is_gpu:
        return events
    return [event for event in events if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)]


def _self_microseconds(event: Any, place: Place) -> float:
    return float(event.self_device_time_total if place.is_gpu else event.self_cpu_time_total)


def report_stalls(outcome: Outcome, session: Session, measured: MeasuredStreams, place: Place, count: int) -> None:
    """Measures `count` steps after a few; every rank must call it."""
    time_steps(session, place, 1, 0)
    measured.is_recording = True
    steps = time_steps(session, place, 0, count)
    measured.is_recording = False
    stalls = {where: seconds / count for where, seconds in measured.take().items()}
    in_staging = sum(seconds for where, seconds in stalls.items() if where.startswith("staging"))
    outcome.measure(stalls_seconds_per_step=stalls, step_seconds_with_marks=steps.seconds)
    outcome.say(
        f"computation stands still for {sum(stalls.values()) * 1e3:.2f} ms of a step of {steps.median * 1e3:.1f} ms, "
        f"{in_staging * 1e3:.2f} ms of it for buffers",
        *(f"    {seconds * 1e3:8.3f} ms  {where}" for where, seconds in stalls.items()),
    )


def _time_if_it_fits(time: Deadline, outcome: Outcome, place: Place, flags: str, variant: Variant) -> None:
    try:
        _time_variant(time, outcome, place, flags, variant)
    except torch.OutOfMemoryError as error:
        if not variant.may_not_fit:
            raise
        raise NotDone("it does not fit into the memory of this GPU") from error


def _time_variant(time: Deadline, outcome: Outcome, place: Place, flags: str, variant: Variant) -> None:
    """Times steps of one micro-batch and, if there is time, of several."""
    if not time.has(variant.seconds):
        outcome.ran_late(variant.name)
        return
    try:
        session = Session(f"{flags} {variant.flags}", RankPlace.alone(place.device))
    except ValueError as refusal:
        outcome.omit(f"{variant.name}: {refusal}")
        return
    _report_speed(outcome, session, time_steps(session, place, WARMUP_STEPS, SHORT_STEPS), place, f"1 micro-batch, {variant.name}")
    _time_microbatches(time, outcome, session, place, f", {variant.name}")
    session.close()
