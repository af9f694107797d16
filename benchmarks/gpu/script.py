"""Runs the training script itself: models of 125M and 1.3B parameters on one rank, a trace, and ZeRO++ and lean on 4 ranks of one GPU."""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.device_errors import attempt
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place
from benchmarks.gpu.rank_processes import ONE_GPU_EACH, in_words, ran_out_of_time, run_ranks
from benchmarks.gpu.sharing import working_sharing
from benchmarks.report import ROOT
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.host_threads import own_cores
from megatron_zpp.training.members import PlannedWorld
from megatron_zpp.training.run_plan import plan_as_given
from megatron_zpp.training.setup import build_vocabulary

ENTRY = "pretrain_zeropp_gpt.py"
LOG, TRACES = "run.jsonl", "traces"
COMMON = (
    "--bf16 --mock-data --lr 1e-4 --lr-decay-style constant --eval-iters 0 --log-interval 1 --log-throughput "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0 --distributed-timeout-minutes 1"
)
RANKS, RANKS_PER_NODE = 4, 2
SMALL = "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 2"
CPU_SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
VOCABULARY, CPU_VOCABULARY = 50257, 500
PROFILE = "--timing-log-level 2 --profile --profile-step-start 5 --profile-step-end 6"
WARMUP_STEPS, STEPS, FEW_STEPS = 5, 20, 9
LAST_STEPS = 5  # without a warm-up of the learning rate, single steps of a large model have a loss as high as the first
RUN_SECONDS = 110.0
LEAST_SECONDS = 25.0  # below which no run is begun
TIMER_LINES = 16  # at the end of what a profiled run has printed
PLAN_SLACK = 0.05  # of the plan; activations are an estimate
GIB = 2**30


@dataclass(frozen=True)
class Run:
    """model: a file of scripts/models, or flags. is_profiled: its trace is kept."""

    name: str
    model: str
    flags: str
    steps: int = STEPS
    ranks: int = 1
    is_profiled: bool = False

    def words(self, place: Place, folder: Path) -> list[str]:
        """Its flags. The log and traces go to `folder`."""
        if place.is_tiny:
            model = CPU_SHAPE.split()
        elif self.model.startswith("--"):
            model = self.model.split()
        else:
            model = _flags_of(self.model)
        nodes = ["--ranks-per-node", str(RANKS_PER_NODE)] if self.ranks > 1 else []
        vocabulary = ["--vocab-size", str(CPU_VOCABULARY if place.is_tiny else VOCABULARY)]
        files = ["--log-jsonl", str(folder / LOG), *(["--profile-dir", str(folder / TRACES)] if self.is_profiled else [])]
        return [*model, *vocabulary, *COMMON.split(), *self.flags.split(), *nodes, "--train-iters", str(self.steps), *files]


RUNS = (
    Run("125M, stage 3", "gpt3_125m", "--micro-batch-size 16 --zero-stage 3"),
    Run("1.3B, stage 3", "gpt3_1.3b", "--micro-batch-size 4 --zero-stage 3"),
    Run("1.3B, stage 1", "gpt3_1.3b", "--micro-batch-size 4 --zero-stage 1"),
    Run("1.3B, stage 3, with a trace", "gpt3_1.3b", f"--micro-batch-size 4 --zero-stage 3 {PROFILE}", FEW_STEPS, is_profiled=True),
    Run("125M, stage 1", "gpt3_125m", "--micro-batch-size 16 --zero-stage 1"),
    Run("4 ranks, ZeRO++", SMALL, "--zeropp paper", FEW_STEPS, RANKS),
    Run("4 ranks, lean", SMALL, "--zeropp lean", FEW_STEPS, RANKS),
)


def run(time: Deadline, outcome: Outcome) -> None:
    place = Place.here()
    if place.is_tiny:
        outcome.omit("models of 125M and 1.3B: torch finds no GPU here; a tiny one was trained on the CPU instead")
    for some in RUNS:
        if not time.has(LEAST_SECONDS):
            outcome.ran_late(f"run '{some.name}'")
            continue
        with tempfile.TemporaryDirectory() as folder:
            attempt(outcome, f"run '{some.name}'", partial(_run, time, outcome, place, some, Path(folder)))


def _run(time: Deadline, outcome: Outcome, place: Place, some: Run, folder: Path) -> None:
    sharing = ONE_GPU_EACH if some.ranks == 1 else working_sharing(time, outcome, some.ranks)
    words, limit = some.words(place, folder), Deadline(min(RUN_SECONDS, time.remaining_seconds()))
    threads = {"OMP_NUM_THREADS": str(max(1, len(own_cores()) // some.ranks))}  # with one, initial values of 1.3B parameters take 20 s
    ended = run_ranks([ENTRY, *words], some.ranks, sharing, folder, limit, threads)
    if ran_out_of_time(ended):
        outcome.ran_late(f"the end of run '{some.name}'")
        outcome.say(*in_words(ended))
        return
    if not outcome.check(f"'{some.name}' ends well", holds=all(end.code == 0 for end in ended)):
        outcome.say(*in_words(ended))
        return
    records = [record for record in map(json.loads, (folder / LOG).read_text().splitlines()) if "lm_loss" in record]
    outcome.measure(**{some.name: records})
    report(outcome, some, records, planned_bytes(words, some.ranks, is_on_gpu=place.is_gpu), is_on_gpu=place.is_gpu)
    for trace in sorted((folder / TRACES).glob("*.json")):
        with trace.open("rb") as source, gzip.open(outcome.folder / "trace.json.gz", "wb") as packed:
            shutil.copyfileobj(source, packed)
        outcome.say(f"    the trace of '{some.name}' is in trace.json.gz")
        outcome.say(*(f"    {line}" for line in ended[0].said[-TIMER_LINES:]))


def planned_bytes(words: list[str], ranks: int, *, is_on_gpu: bool) -> int:
    """What the plan of these flags says that torch's allocator gives on the rank that needs most."""
    ranks_per_node = min(ranks, RANKS_PER_NODE)
    config = resolve(parse_flags(words), ranks, ranks_per_node)
    padded = build_vocabulary(config).padded_size
    need = plan_as_given(config, PlannedWorld(ranks // ranks_per_node, ranks_per_node, is_on_gpu), padded).memory
    return need.beside(need.device).total


@dataclass(frozen=True)
class Speed:
    """Medians of a run after its warm-up; mfu: None if the device's peak is unknown. peak_bytes: of torch's allocator."""

    step_ms: float
    tokens_per_second: float
    mfu: float | None
    peak_bytes: int

    @classmethod
    def of(cls, records: list[dict[str, Any]]) -> Speed:
        """records: of the run's training lines."""
        timed, last = records[WARMUP_STEPS:], records[-1]
        step, tokens = (statistics.median(record[key] for record in timed) for key in ("elapsed_ms_per_iteration", "tokens_per_second"))
        mfu = statistics.median(record["mfu"] for record in timed) if last["mfu"] is not None else None
        return cls(step, tokens, mfu, last["max_memory_bytes"])


def report(outcome: Outcome, some: Run, records: list[dict[str, Any]], planned: int, *, is_on_gpu: bool) -> None:
    """Adds a line of medians after warm-up, and checks that the loss falls and that the peak of memory is as planned."""
    speed, last = Speed.of(records), records[-1]
    losses, peak = [record["lm_loss"] for record in records], speed.peak_bytes
    mfu = f", MFU {speed.mfu:.1%}" if speed.mfu is not None else ""
    sent = f", {last['inter_node_bytes']:,} bytes between nodes and {last['intra_node_bytes']:,} inside per rank" if some.ranks > 1 else ""
    outcome.say(
        f"{some.name}: {speed.step_ms:.1f} ms per step, {speed.tokens_per_second:,.0f} tokens/s{mfu}; "
        f"peak {peak / GIB:.2f} GiB, planned {planned / GIB:.2f}{sent}"
    )
    end = statistics.median(losses[-LAST_STEPS:])
    outcome.check(f"'{some.name}' trains: loss {losses[0]:.3f} to {end:.3f}, the median of the last {LAST_STEPS}", holds=end < losses[0])
    if is_on_gpu:
        statement = f"'{some.name}': the peak of {peak:,} bytes is at most {1 + PLAN_SLACK:.0%} of the planned {planned:,}"
        outcome.check(statement, holds=peak <= (1 + PLAN_SLACK) * planned)


def _flags_of(model: str) -> list[str]:
    """The flags that a file of scripts/models sets."""
    program = f'source scripts/models/{model}.sh; printf "%s\\0" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
