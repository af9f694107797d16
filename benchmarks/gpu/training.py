"""Trains a GPT of about 1 billion parameters in one process: speed, the parts of a step's time, and memory compared with the plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from gpu.outcome import Outcome

if TYPE_CHECKING:
    from megatron_zpp.data.loader import MicroBatch
    from megatron_zpp.training.step import StepOutcome
    from megatron_zpp.zero.engine import ZeroEngine

GPU_SHAPE = "--num-layers 18 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4 --vocab-size 50257"
CPU_SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --vocab-size 500"
FLAGS = "--bf16 --zero-stage 3 --mock-data --train-iters 100 --lr 1e-4 --attention-dropout 0 --hidden-dropout 0"
WARMUP_STEPS, TIMED_STEPS, PROFILED_STEPS = 3, 8, 3
# Parts of the names of libraries' kernels and of torch's CPU operators.
MATRIX_NAMES = ("gemm", "nvjet", "cutlass", "xmma", "wgmma", "cublas", "aten::mm", "aten::addmm", "aten::bmm")
ATTENTION_NAMES = ("flash", "fmha", "attention", "cudnn_generated")
MATRIX, ATTENTION, OTHER = "matrix products", "attention", "everything else"
NAMED_KERNELS = 12


@dataclass(frozen=True)
class Session:
    """A model with its engine, and the memory that was planned for it."""

    step: Callable[[], StepOutcome]
    engine: ZeroEngine
    planned_states: int
    planned_total: int
    parameters: int
    flops_per_step: float
    hardware_flops_per_step: float


def run() -> Outcome:
    from megatron_zpp.monitor.memory import max_memory_bytes

    outcome = Outcome()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        outcome.omissions.append("a GPT of 1 billion parameters: torch finds no GPU here; a tiny one was trained on the CPU instead")
    session = _start(GPU_SHAPE if on_gpu else CPU_SHAPE)
    device = session.engine.device
    outcomes = [session.step() for _ in range(WARMUP_STEPS)]
    seconds = []
    for _ in range(TIMED_STEPS):
        start = time.perf_counter()
        outcomes.append(session.step())
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    step_seconds = statistics.median(seconds)
    peak = max_memory_bytes(device)
    busy = _profile(session, step_seconds, outcome)
    losses = [some.lm_loss for some in outcomes]
    states = outcomes[-1].model_state_bytes
    outcome.check(
        f"{session.parameters / 1e9:.3f} billion parameters train: loss {losses[0]:.3f} to {losses[-1]:.3f}", holds=losses[-1] < losses[0]
    )
    outcome.check(f"model states hold {states:,} bytes as planned ({session.planned_states:,})", holds=states == session.planned_states)
    teraflops, hardware = (flops / step_seconds / 1e12 for flops in (session.flops_per_step, session.hardware_flops_per_step))
    outcome.lines += [
        f"{step_seconds * 1e3:.1f} ms per step (median of {TIMED_STEPS}, {min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})",
        f"{teraflops:.1f} TFLOP/s of model FLOPs (Megatron-LM's convention), {hardware:.1f} of hardware FLOPs (Megatron-DeepSpeed's)",
        f"peak memory {peak / 2**30:.2f} GiB, planned {session.planned_total / 2**30:.2f} GiB with activations estimated",
    ]
    outcome.measured |= {
        "parameters": session.parameters,
        "step_seconds": seconds,
        "model_teraflops_per_second": teraflops,
        "hardware_teraflops_per_second": hardware,
        "model_state_bytes": states,
        "planned_state_bytes": session.planned_states,
        "planned_total_bytes": session.planned_total,
        "max_memory_bytes": peak,
        "losses": losses,
        **busy,
    }
    return outcome


def _start(shape: str) -> Session:
    from megatron_zpp.config.cli import parse_flags
    from megatron_zpp.config.resolve import resolve
    from megatron_zpp.model.flops import hardware_flops, model_flops, parameter_count
    from megatron_zpp.parallel.initialize import World, choose_device
    from megatron_zpp.parallel.launch import Launch
    from megatron_zpp.training import setup
    from megatron_zpp.training.instruments import make_instruments
    from megatron_zpp.training.memory_need import memory_need
    from megatron_zpp.training.sharding import sharding_of
    from megatron_zpp.training.step import StepOutcome, forward_backward, gather_numbers

    config = resolve(parse_flags(f"{shape} {FLAGS}".split()), 1, None)
    launch = Launch(0, 1, 0, 1)
    world = World(launch, choose_device(launch, None), timedelta(minutes=5))
    instruments = make_instruments(config, world.device, launch.rank)
    ladder = setup.build_ladder(config, world, instruments)
    padded_vocab = setup.build_vocabulary(config).padded_size
    model = setup.build_model(config, padded_vocab, None)
    samples = config.training.micro_batch_size
    need = memory_need(config, model, sharding_of(config), ladder.grid, is_on_gpu=world.device.type == "cuda")
    engine = setup.build_engine(config, model, ladder, instruments)
    batches = _same_batch(samples, config.model.seq_length, config.data.vocab_size or padded_vocab)

    def step() -> StepOutcome:
        loss_sum = forward_backward(model, engine, batches, microbatches=1)
        model_state_bytes = engine.model_state_bytes()
        update = engine.update(learning_rate=1e-4, weight_decay=0.0)
        loss = gather_numbers([loss_sum], engine).item()
        return StepOutcome(loss, update.grad_norm, update.is_skipped, model_state_bytes)

    return Session(
        step=step,
        engine=engine,
        planned_states=need.plan.states,
        planned_total=need.beside(need.device).total,  # what torch's allocator gives
        parameters=parameter_count(config.model, padded_vocab),
        flops_per_step=model_flops(config.model, padded_vocab, samples),
        hardware_flops_per_step=hardware_flops(config.model, padded_vocab, samples, micro_batch_size=samples),
    )


def _same_batch(samples: int, seq_length: int, vocab_size: int) -> Iterator[MicroBatch]:
    from megatron_zpp.data.loader import MicroBatch

    tokens = torch.randint(0, vocab_size, (samples, seq_length + 1), generator=torch.Generator().manual_seed(1))
    batch = MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.ones(samples, seq_length), 0)
    while True:
        yield batch


def _profile(session: Session, step_seconds: float, outcome: Outcome) -> dict[str, object]:
    """Seconds per step by kind of kernel, and the share of the step outside matrix products and attention."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = session.engine.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED_STEPS):
            session.step()
        _synchronize(session.engine.device)
    times = {event.key: _self_microseconds(event, on_gpu) / PROFILED_STEPS / 1e6 for event in profiled.key_averages()}
    kinds = {MATRIX: 0.0, ATTENTION: 0.0, OTHER: 0.0}
    for name, seconds in times.items():
        kinds[_kind(name)] += seconds
    outside = 1 - (kinds[MATRIX] + kinds[ATTENTION]) / step_seconds
    outcome.lines += [f"{kind}: {seconds * 1e3:.2f} ms per step" for kind, seconds in kinds.items()]
    outcome.lines.append(
        f"{outside:.1%} of the step is outside matrix products and attention; the GPU is busy for {sum(kinds.values()) / step_seconds:.1%}"
    )
    slowest = sorted(((seconds, name) for name, seconds in times.items() if seconds > 0), reverse=True)[:NAMED_KERNELS]
    outcome.lines += [f"    {seconds * 1e3:8.2f} ms  {name[:110]}" for seconds, name in slowest]
    return {"seconds_by_kind": kinds, "share_outside_matrix_products": outside}


def _self_microseconds(event: Any, on_gpu: bool) -> float:
    return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)


def _kind(name: str) -> str:
    lowered = name.lower()
    if any(part in lowered for part in ATTENTION_NAMES):
        return ATTENTION
    return MATRIX if any(part in lowered for part in MATRIX_NAMES) else OTHER


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
