"""Trains with the configurations of threads.py on 4 ranks as 2 nodes x 2 over NCCL, and compares losses that must be equal bit for bit.

Ranks are processes that run the training script. On a machine with fewer GPUs than ranks they share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.differences import largest_difference
from benchmarks.gpu.entry_runs import Entry, Finished, run_entries
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.rank_processes import Sharing
from benchmarks.gpu.sharing import working_sharing
from benchmarks.gpu.threads import HPZ, NODES, RANKS_PER_NODE, ZEROPP
from megatron_zpp.ops.extension import REFERENCE_VARIABLE

RANKS = NODES * RANKS_PER_NODE
RUN_SECONDS = 60.0
SHAPE = (
    "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --mock-data --num-workers 0 "
    "--train-iters 4 --micro-batch-size 2 --lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0 --deterministic-mode "
    f"--ranks-per-node {RANKS_PER_NODE} --distributed-timeout-minutes 1"
)


@dataclass(frozen=True)
class Run:
    """Flags of one run. same_as: the run whose losses and gradient norms it must have."""

    name: str
    flags: str
    same_as: str | None = None

    @property
    def entry(self) -> Entry:
        return Entry(self.name, f"{SHAPE} {self.flags}")


# The most important runs come first, because time may run out.
RUNS = (
    Run("ZeRO-3", "--zero-stage 3 --bf16"),
    Run("ZeRO-0", "--zero-stage 0 --bf16", "ZeRO-3"),
    Run("ZeRO-1", "--zero-stage 1 --bf16", "ZeRO-3"),
    Run("ZeRO-2", "--zero-stage 2 --bf16", "ZeRO-3"),
    Run("ZeRO++ without hpZ", ZEROPP.replace(HPZ, "")),
    Run("all of ZeRO++", ZEROPP, "ZeRO++ without hpZ"),
    Run("ZeRO-3, recomputation", "--zero-stage 3 --bf16 --checkpoint-activations", "ZeRO-3"),
    Run("ZeRO-3 and hpZ", f"--zero-stage 3 --bf16 {HPZ}", "ZeRO-3"),
    Run("all of ZeRO++, recomputation", f"{ZEROPP} --checkpoint-activations", "all of ZeRO++"),
    Run("ZeRO-3, 2 tensor ranks", "--zero-stage 3 --bf16 --tensor-model-parallel-size 2"),
    Run("ZeRO-1, 2 tensor ranks", "--zero-stage 1 --bf16 --tensor-model-parallel-size 2", "ZeRO-3, 2 tensor ranks"),
    Run("ZeRO-3, 2 tensor ranks, divided inputs on the host",
        "--zero-stage 3 --bf16 --tensor-model-parallel-size 2 --checkpoint-activations --partition-activations --checkpoint-in-cpu",
        "ZeRO-3, 2 tensor ranks"),
    Run("ZeRO-3, sequence parallelism", "--zero-stage 3 --bf16 --tensor-model-parallel-size 2 --sequence-parallel"),
    Run("ZeRO-3, sequence parallelism, recomputation",
        "--zero-stage 3 --bf16 --tensor-model-parallel-size 2 --sequence-parallel --checkpoint-activations",
        "ZeRO-3, sequence parallelism"),
    Run("ZeRO-3, fp32, 4 context ranks on 2 nodes", "--zero-stage 3 --context-parallel-size 4"),
    Run("ZeRO-0, fp32, 4 context ranks on 2 nodes", "--zero-stage 0 --context-parallel-size 4",
        "ZeRO-3, fp32, 4 context ranks on 2 nodes"),
)  # fmt: skip
ON_REFERENCE = (Run("all of ZeRO++, reference ops", ZEROPP, "all of ZeRO++"),)
# Of losses and norms. On GPUs the loss has other roundings without its kernels, which quantization makes larger: an H100 had 1e-3.
REFERENCE_SLACK = 0.01


def run(time: Deadline, outcome: Outcome) -> None:
    sharing = working_sharing(time, outcome, RANKS)
    outcome.measure(backend="nccl" if torch.cuda.is_available() else "gloo")
    found: dict[str, Finished] = {}
    compare_runs(time, outcome, RUNS, sharing, found, {})
    slack = REFERENCE_SLACK if torch.cuda.is_available() else 0.0
    compare_runs(time, outcome, ON_REFERENCE, sharing, found, {REFERENCE_VARIABLE: "1"}, slack)


def compare_runs(
    time: Deadline,
    outcome: Outcome,
    runs: Sequence[Run],
    sharing: Sharing,
    found: dict[str, Finished],
    environment: dict[str, str],
    slack: float = 0.0,
) -> None:
    """Makes the runs in one world, and compares each with those before it. found: by name, the runs so far; it gets the new ones.

    slack: by how much of themselves losses and norms may differ; with 0 they are compared bit for bit.
    """
    by_name = {some.name: some for some in runs}
    tried = []
    for finished in run_entries([some.entry for some in runs], RANKS, sharing, time, run_seconds=RUN_SECONDS, environment=environment):
        some = by_name[finished.entry.name]
        if finished.is_late:
            outcome.say(f"'{some.name}' does not end within {RUN_SECONDS:.0f} s", *finished.errors)
            continue
        tried.append(some.name)
        if not outcome.check(f"'{some.name}' ends well", holds=not finished.errors):
            outcome.say(*finished.errors)
            continue
        found[some.name] = finished
        outcome.measure(losses={name: one.losses for name, one in found.items()})
        losses = finished.losses
        outcome.check(f"'{some.name}' trains: loss {losses[0][0]:.4f} to {losses[-1][0]:.4f}", holds=losses[-1][0] < losses[0][0])
        if some.same_as in found:
            expected = found[some.same_as].losses
            how, holds = "bit for bit", losses == expected
            if slack:
                off = largest_difference(chain.from_iterable(losses), chain.from_iterable(expected))
                how, holds = f"within {slack:.0%} (found {off:.1e})", off <= slack
            outcome.check(f"'{some.name}' has the losses and gradient norms of '{some.same_as}', {how}", holds=holds)
    for name in by_name:
        if name not in tried:
            outcome.ran_late(f"run '{name}'")
