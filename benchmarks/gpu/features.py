"""Trains a small GPT for a few steps with each feature of the model, and names the kernels that computed attention."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.device_errors import in_words, is_fatal
from benchmarks.gpu.differences import largest_difference
from benchmarks.gpu.kernel_kinds import attention_kernels
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place
from benchmarks.gpu.training import device_events
from megatron_zpp.ops import extension
from testbed.session import RankPlace, Session

SHAPE = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --vocab-size 1000 --micro-batch-size 2 --mock-data --train-iters 10 "
    "--zero-stage 3"
)
LENGTHS = {True: "--seq-length 64", False: "--seq-length 512"}  # of a tiny run, and of one on a GPU
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
PLAIN = f"--bf16 {NO_DROPOUT}"
LLAMA = f"{PLAIN} --position-embedding-type rope --normalization RMSNorm --swiglu --num-query-groups 2 --disable-bias-linear "
LLAMA += "--untie-embeddings-and-output-weights"
STEPS = 4
SECONDS_PER_CASE = 3.0
COMPILE_SECONDS = 40.0
COMPILED_TOLERANCE = 1e-2  # of the loss, in bf16


@dataclass(frozen=True)
class Case:
    """shows: whether the kernels of attention are those that the case asks for. same_as: a case whose losses it has within rounding."""

    name: str
    flags: str
    shows: Callable[[list[str]], bool] | None = None
    same_as: str | None = None
    seconds: float = SECONDS_PER_CASE


def _any_has(*parts: str) -> Callable[[list[str]], bool]:
    return lambda kernels: any(part in kernel.lower() for part in parts for kernel in kernels)


CASES = (
    Case("plain", PLAIN),
    Case("attention by flash", f"{PLAIN} --attention-backend flash", _any_has("flash")),
    Case("attention fused", f"{PLAIN} --attention-backend fused", _any_has("fmha", "cudnn", "efficient", "mem_eff")),
    Case("attention unfused", f"{PLAIN} --attention-backend unfused", lambda kernels: not kernels),
    Case("attention local", f"{PLAIN} --attention-backend local", lambda kernels: not kernels),
    Case("fp32", NO_DROPOUT),
    Case("fp16", f"--fp16 --initial-loss-scale 65536 {NO_DROPOUT}"),
    Case("rotary positions", f"{PLAIN} --position-embedding-type rope"),
    Case("grouped queries", f"{PLAIN} --num-query-groups 2"),
    Case("SwiGLU", f"{PLAIN} --swiglu"),
    Case("RMSNorm", f"{PLAIN} --normalization RMSNorm"),
    Case("Llama", LLAMA),
    Case("Qwen3", f"{LLAMA} --qk-layernorm"),
    Case("documents", f"{PLAIN} --reset-attention-mask --reset-position-ids"),
    Case("documents in a Llama", f"{LLAMA} --reset-attention-mask --reset-position-ids"),
    Case("dropout of attention weights", "--bf16 --attention-dropout 0.1 --hidden-dropout 0"),
    Case("dropout of hidden values", "--bf16 --attention-dropout 0 --hidden-dropout 0.1"),
    Case("recomputed blocks", f"{PLAIN} --checkpoint-activations", same_as="plain"),
    Case("inputs of blocks in an arena", f"{PLAIN} --checkpoint-activations --contiguous-checkpointing", same_as="plain"),
    Case("inputs of blocks on the host", f"{PLAIN} --checkpoint-activations --checkpoint-in-cpu", same_as="plain"),
    Case("recomputed attention", f"{PLAIN} --recompute-granularity selective", same_as="plain"),
    Case("loss in chunks", f"{PLAIN} --loss-chunk-tokens 64", same_as="plain"),
    Case("compiled", f"{PLAIN} --compile", same_as="plain", seconds=COMPILE_SECONDS),
    Case("compiled Llama", f"{LLAMA} --compile", same_as="Llama", seconds=COMPILE_SECONDS),
)


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    extension.load()
    losses: dict[str, list[float]] = {}
    for case in CASES:
        if case.seconds == COMPILE_SECONDS and place.is_tiny:
            outcome.omit(f"{case.name}: only on a GPU")
        elif not time.has(case.seconds):
            outcome.ran_late(case.name)
        else:
            try:
                _try(outcome, place, case, losses)
            except Exception as error:
                outcome.check(f"{case.name} runs, and does not end with {in_words(error)}", holds=False)
                if is_fatal(error):
                    outcome.say("nothing more can run in this process, because the error has made the device unusable")
                    return
        if place.is_gpu:
            gc.collect()


def _try(outcome: Outcome, place: Place, case: Case, losses: dict[str, list[float]]) -> None:
    try:
        session = Session(f"{SHAPE} {LENGTHS[place.is_tiny]} {case.flags}", RankPlace.alone(place.device))
    except ValueError as refusal:
        if refusal.__cause__ is not None:  # a kernel has failed that torch has
            raise
        outcome.omit(f"{case.name}: {refusal}")
        return
    found = [session.step(2 * step)[0] for step in range(STEPS)]
    losses[case.name] = found
    kernels = attention_kernels(_kernels(session, place))
    session.close()
    named = ", ".join(kernels) or "kernels without a name of their own"
    outcome.check(f"{case.name} trains: loss {found[0]:.4f} to {found[-1]:.4f}, attention by {named}", holds=found[-1] < found[0])
    outcome.measure(**{case.name: {"losses": found, "attention": kernels}})
    if case.shows is not None and place.is_gpu:
        outcome.check(f"{case.name}: the kernels of attention are those asked for", holds=case.shows(kernels))
    if case.same_as in losses:
        largest = largest_difference(found, losses[case.same_as])
        statement = f"{case.name} has the losses of {case.same_as} within {COMPILED_TOLERANCE:g} (found {largest:.1e})"
        outcome.check(statement, holds=largest <= COMPILED_TOLERANCE)


def _kernels(session: Session, place: Place) -> list[str]:
    """The names of all kernels of one step; on a CPU of operators."""
    with profile(activities=[ProfilerActivity.CUDA if place.is_gpu else ProfilerActivity.CPU]) as profiled:
        session.step(0)
        place.synchronize()
    return [event.key for event in device_events(profiled, place)]
