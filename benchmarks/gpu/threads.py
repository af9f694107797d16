"""Trains a small GPT with each configuration of its table on 2 nodes x 2 ranks, which are threads that share one device.

Losses, gradient norms and weights must be equal bit for bit between configurations that only differ in where state rests, and between runs
with and without random delays on every stream. The streams of a rank are its own, and events order what crosses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.delays import DeafLanes, DelayedBackend, DelayedLanes, Delays, Sleep, delay_computation, sleep_on_gpu
from benchmarks.gpu.device_errors import in_words, is_fatal
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place
from megatron_zpp.ops import extension
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.startup_checks import use_deterministic_kernels
from testbed.session import RankPlace, Session
from testbed.thread_ranks import run_on_cpu, run_on_one_gpu

NODES, RANKS_PER_NODE = 2, 2
STEPS = 3
DELAY_SECONDS = 2e-3
DELAY_SEEDS = (1, 2)
# Computation begins a step that late when there are delays. Threads of one process take about as long to enqueue a step, and a stream that
# waits for the host reads nothing too early: on an H100 a run without waits had the right bits before steps were held.
HELD_SECONDS = 0.5
SECONDS_PER_RUN = 10.0  # at most, once the first has ended

# Attention's dropout draws from one generator per device, which threads would share.
SHAPE = (
    "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --micro-batch-size 2 --mock-data "
    "--train-iters 10 --attention-dropout 0 --quantization-block-size 64"
)
HPZ = f"--zero-hpz-partition-size {RANKS_PER_NODE}"
QUANTIZED = "--zero-quantized-weights --zero-quantized-gradients"
TWO_MICROBATCHES = f"--global-batch-size {2 * 2 * NODES * RANKS_PER_NODE}"
ZEROPP = f"--zero-stage 3 --bf16 {QUANTIZED} {HPZ} {TWO_MICROBATCHES}"


@dataclass(frozen=True)
class Run:
    """Flags of one run. same_as: the run whose bits it must have. quantizes: it needs kernels, so that it does not wait for the reference.

    delay_seed: of random delays; None for none. is_deaf: computation does not wait for lanes, which must change the bits.
    tensor_ranks: how many ranks share the layers. context_ranks: how many divide the tokens of each sample.
    """

    name: str
    flags: str
    same_as: str | None = None
    quantizes: bool = False
    delay_seed: int | None = None
    is_deaf: bool = False
    tensor_ranks: int = 1
    context_ranks: int = 1

    def delayed(self, seed: int) -> Run:
        return replace(self, name=f"{self.name}, delays {seed}", same_as=self.name, delay_seed=seed)


ZERO_3 = Run("ZeRO-3", "--zero-stage 3 --bf16")
ALL_OF_ZEROPP = Run("all of ZeRO++", ZEROPP, "ZeRO++ without hpZ", quantizes=True)
WITHOUT_HPZ = Run("ZeRO++ without hpZ", ZEROPP.replace(HPZ, ""), quantizes=True)
TENSOR = Run("ZeRO-3, 2 tensor ranks", "--zero-stage 3 --bf16", tensor_ranks=2)
SEQUENCE = Run("ZeRO-3, sequence parallelism", "--zero-stage 3 --bf16 --sequence-parallel", tensor_ranks=2)
CONTEXT = Run("ZeRO-3, fp32, 4 context ranks on 2 nodes", "--zero-stage 3 --num-query-groups 2", context_ranks=4)
DEAF = Run("ZeRO-3 without waiting, delays", "--zero-stage 3 --bf16", "ZeRO-3", delay_seed=7, is_deaf=True)
# The most important runs come first, because time may run out.
RUNS = (
    ZERO_3,
    *(ZERO_3.delayed(seed) for seed in DELAY_SEEDS),
    Run("ZeRO-0", "--zero-stage 0 --bf16", "ZeRO-3"),
    Run("ZeRO-1", "--zero-stage 1 --bf16", "ZeRO-3"),
    Run("ZeRO-2", "--zero-stage 2 --bf16", "ZeRO-3"),
    WITHOUT_HPZ,
    ALL_OF_ZEROPP,
    *(ALL_OF_ZEROPP.delayed(seed) for seed in DELAY_SEEDS),
    TENSOR,
    TENSOR.delayed(8),
    Run("ZeRO-0, 2 tensor ranks", "--zero-stage 0 --bf16", TENSOR.name, tensor_ranks=2),
    Run("ZeRO-3, 2 tensor ranks, divided inputs, delays", "--zero-stage 3 --bf16 --checkpoint-activations --partition-activations",
        TENSOR.name, delay_seed=11, tensor_ranks=2),
    Run("ZeRO-3, 2 tensor ranks, divided inputs on the host, delays",
        "--zero-stage 3 --bf16 --checkpoint-activations --partition-activations --checkpoint-in-cpu", TENSOR.name, delay_seed=12,
        tensor_ranks=2),
    SEQUENCE,
    SEQUENCE.delayed(9),
    Run("ZeRO-3, sequence parallelism, recomputation, delays", f"{SEQUENCE.flags} --checkpoint-activations", SEQUENCE.name,
        delay_seed=10, tensor_ranks=2),
    CONTEXT,
    Run("ZeRO-0, fp32, 4 context ranks on 2 nodes", "--zero-stage 0 --num-query-groups 2", CONTEXT.name, context_ranks=4),
    Run("ZeRO-3, fp32, 4 context ranks on 2 nodes, recomputation, delays", f"{CONTEXT.flags} --checkpoint-activations", CONTEXT.name,
        delay_seed=13, context_ranks=4),
    Run("ZeRO-3 and hpZ", f"--zero-stage 3 --bf16 {HPZ}", "ZeRO-3"),
    Run("ZeRO-3, recomputation, delays", "--zero-stage 3 --bf16 --checkpoint-activations", "ZeRO-3", delay_seed=3),
    Run("ZeRO-3, no prefetch", "--zero-stage 3 --bf16 --zero-prefetch-units 0 --zero-prefetch-units-intra 0", "ZeRO-3"),
    Run("ZeRO-2, delays", "--zero-stage 2 --bf16", "ZeRO-3", delay_seed=4),
    Run("ZeRO-0, delays", "--zero-stage 0 --bf16", "ZeRO-3", delay_seed=5),
    Run("rotated, stochastic", f"{ZEROPP} --zero-quantized-gradients-rotation hadamard --zero-quantized-gradients-rounding stochastic",
        quantizes=True),
    Run("rotated, stochastic, delays",
        f"{ZEROPP} --zero-quantized-gradients-rotation hadamard --zero-quantized-gradients-rounding stochastic",
        "rotated, stochastic", quantizes=True, delay_seed=6),
    DEAF,  # last, because it may make the device unusable: hops write to memory that has other owners by then
)  # fmt: skip


@dataclass(frozen=True)
class Bits:
    """What a run has computed: mean loss and gradient norm of every step, and a digest of the weights at its end."""

    history: tuple[tuple[float, float], ...]
    weights: str
    delays: int = 0

    def same(self, other: Bits) -> bool:
        return (self.history, self.weights) == (other.history, other.weights)


# Runs a program on every rank of a grid.
RunRanks = Callable[[Grid, torch.device, Callable[[RankPlace], Bits]], list[Bits]]


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    if place.is_gpu:
        use_deterministic_kernels()
    else:
        outcome.omit("streams: torch finds no GPU here; the ranks were threads on the CPU")
    extension.load()
    has_kernels = extension.has_kernels_for(place.device.type)
    if not has_kernels:
        outcome.omit(f"runs that quantize, on kernels: {extension.report(place.device.type)}")
    runs = [some for some in RUNS if _can_run(some, is_gpu=place.is_gpu, has_kernels=has_kernels)]
    run_ranks, sleep = (run_on_one_gpu, sleep_on_gpu) if place.is_gpu else (run_on_cpu, None)
    compare_runs(time, outcome, runs, place.device, run_ranks, sleep)


def _can_run(some: Run, *, is_gpu: bool, has_kernels: bool) -> bool:
    if is_gpu:
        return has_kernels or not some.quantizes
    return some.delay_seed is None


def compare_runs(
    time: Deadline, outcome: Outcome, runs: list[Run] | tuple[Run, ...], device: torch.device, run_ranks: RunRanks, sleep: Sleep | None
) -> None:
    """Runs each of `runs` and compares its bits. sleep: see Delays; without it there are no delays."""
    found = dict[str, Bits]()
    for some in runs:
        if found and not time.has(SECONDS_PER_RUN):
            outcome.ran_late(f"run '{some.name}'")
            continue
        try:
            of_ranks = run_ranks(grid_of(some), device, partial(train, some, sleep))
        except Exception as error:
            words = f"'{some.name}' {'shows that a wait is missing, by' if some.is_deaf else 'ends well, and not with'} {in_words(error)}"
            outcome.check(words, holds=some.is_deaf)
            if is_fatal(error):
                outcome.say("nothing more can run in this process, because the error has made the device unusable")
                return
            continue
        found[some.name] = of_ranks[0]
        _compare(outcome, some, of_ranks, found)
        outcome.measure(runs={**outcome.measured.get("runs", {}), some.name: asdict(found[some.name])})
    outcome.measure(cublas=os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))


def grid_of(some: Run) -> Grid:
    """The world of the run."""
    return Grid.of_nodes(NODES, RANKS_PER_NODE, some.tensor_ranks, some.context_ranks)


def train(some: Run, sleep: Sleep | None, place: RankPlace) -> Bits:
    """The bits of this rank. Every rank must call it."""
    delays = None
    if sleep is not None and some.delay_seed is not None:
        delays = Delays(sleep, 100 * some.delay_seed + place.backend.rank, DELAY_SECONDS)
        lanes = DelayedLanes(DeafLanes(place.lanes) if some.is_deaf else place.lanes, delays)
        place = replace(place, backend=DelayedBackend(place.backend, delays), lanes=lanes)
    groups = f"--tensor-model-parallel-size {some.tensor_ranks} --context-parallel-size {some.context_ranks}"
    session = Session(f"{SHAPE} {some.flags} --ranks-per-node {RANKS_PER_NODE} {groups}", place)
    if delays is not None:
        delay_computation(session.model, session.model.uses(), delays)
    history = []
    for step in range(STEPS):
        if delays is not None:
            delays.hold(HELD_SECONDS)
        history.append(session.step(step))
    weights = session.weights_digest()
    session.close()
    return Bits(tuple(history), weights, 0 if delays is None else delays.count)


def _compare(outcome: Outcome, some: Run, of_ranks: list[Bits], found: dict[str, Bits]) -> None:
    own = of_ranks[0]
    if some.is_deaf:
        statement = f"'{some.name}' has other bits than '{some.same_as}', so these delays show a wait that is missing"
        outcome.check(statement, holds=some.same_as not in found or not own.same(found[some.same_as]))
        return
    outcome.check(f"'{some.name}': all ranks have the same weights and losses", holds=all(own.same(other) for other in of_ranks))
    losses = [loss for loss, _ in own.history]
    delays = f", {sum(bits.delays for bits in of_ranks)} delays" if some.delay_seed is not None else ""
    outcome.check(f"'{some.name}' trains: loss {losses[0]:.4f} to {losses[-1]:.4f}{delays}", holds=losses[-1] < losses[0])
    if some.same_as in found:
        outcome.check(f"'{some.name}' has the bits of '{some.same_as}'", holds=own.same(found[some.same_as]))
