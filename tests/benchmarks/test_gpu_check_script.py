"""The parts of benchmarks/gpu_check.py that run other programs on a GPU: the training script, compute-sanitizer and ncu."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.fake_commands import FakeCommands

from benchmarks.gpu import counters, kernel_program, sanitizer, script
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.outcome import NotDone, Outcome
from benchmarks.gpu.place import Place
from benchmarks.gpu.rank_processes import HOST_IDS, Ended
from benchmarks.gpu.texts import printed
from megatron_zpp.config.cli import parse_flags
from testbed.kernels.timed_ops import timed_ops

GPU = Place(torch.device("cuda", 0), is_tiny=False)


def record(step: int, peak: int = 100, mfu: float | None = 0.5) -> dict[str, Any]:
    """As the training script logs it. The first steps are slow."""
    return {
        "lm_loss": 10.0 - step,
        "elapsed_ms_per_iteration": 900.0 if step < script.WARMUP_STEPS else 100.0 + step,
        "tokens_per_second": 10.0 if step < script.WARMUP_STEPS else 80_000.0,
        "mfu": mfu,
        "max_memory_bytes": peak,
        "inter_node_bytes": 7_000,
        "intra_node_bytes": 9_000,
    }


def test_a_run_is_reported_by_medians_after_warm_up_with_its_peak_beside_the_plan() -> None:
    outcome = Outcome()
    script.report(outcome, script.RUNS[0], [record(step, 105 << 28) for step in range(8)], 100 << 28, is_on_gpu=True)
    assert outcome.lines[0] == "125M, stage 3: 106.0 ms per step, 80,000 tokens/s, MFU 50.0%; peak 26.25 GiB, planned 25.00"
    assert outcome.failures == []
    script.report(outcome, script.RUNS[-1], [record(step, 106 << 28, None) for step in range(8)], 100 << 28, is_on_gpu=True)
    assert outcome.lines[3].endswith("planned 25.00, 7,000 bytes between nodes and 9,000 inside per rank")
    assert [failure.partition(":")[0] for failure in outcome.failures] == ["'4 ranks, lean'"]


@pytest.mark.parametrize("high_steps, failures", [((9,), 0), ((5, 7, 9), 1)])
def test_a_run_trains_if_the_median_of_its_last_losses_is_below_the_first(high_steps: tuple[int, ...], failures: int) -> None:
    records = [record(step) | ({"lm_loss": 11.0} if step in high_steps else {}) for step in range(10)]
    outcome = Outcome()
    script.report(outcome, script.RUNS[0], records, 100, is_on_gpu=True)
    assert len(outcome.failures) == failures and len(outcome.lines) == 3


@pytest.mark.parametrize("run", script.RUNS, ids=lambda run: run.name)
def test_the_flags_of_a_run_parse_and_have_a_plan_that_fits_an_h100(run: script.Run, tmp_path: Path) -> None:
    words = run.words(GPU, tmp_path)
    shape = parse_flags(words).model
    if run.model.startswith("gpt3"):
        assert (shape.num_layers, shape.hidden_size) == {"gpt3_125m": (12, 768), "gpt3_1.3b": (24, 2048)}[run.model]
    assert script.planned_bytes(words, run.ranks, is_on_gpu=True) * run.ranks < 70 * script.GIB


def test_a_run_that_cannot_be_read_is_a_failure_and_the_others_still_run_each_with_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, dict[str, str]]] = []

    def run_ranks(words: list[str], ranks: int, sharing: object, folder: Path, time: Deadline, environment: dict[str, str]) -> list[Ended]:
        started.append((ranks, environment))
        return [Ended(0, 0, 1.0, [])]  # without a log

    monkeypatch.setattr(script, "run_ranks", run_ranks)
    monkeypatch.setattr(script, "working_sharing", lambda time, outcome, ranks: HOST_IDS)
    monkeypatch.setattr(script, "own_cores", lambda: list(range(16)))
    outcome = Outcome(folder=tmp_path)
    script.run(Deadline(1e6, lambda: 0.0), outcome)
    assert started[:2] == [(1, {"OMP_NUM_THREADS": "16"})] * 2 and started[-1] == (4, {"OMP_NUM_THREADS": "4"})
    assert len(started) == len(outcome.failures) == len(script.RUNS)
    assert outcome.failures[0].startswith("run '125M, stage 3' runs, and does not end with FileNotFoundError")


def test_the_errors_of_ranks_are_printed_however_much_they_have_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [f"flag_{number} ........ None" for number in range(58)]
    ended = [Ended(rank, 2, 1.0, [*flags, f"error: no kernels for rank {rank}"]) for rank in range(4)]
    monkeypatch.setattr(script, "RUNS", script.RUNS[-1:])
    monkeypatch.setattr(script, "working_sharing", lambda time, outcome, ranks: HOST_IDS)
    monkeypatch.setattr(script, "run_ranks", lambda *_: ended)
    outcome = Outcome(folder=tmp_path)
    script.run(Deadline(1e6, lambda: 0.0), outcome)
    text = printed({"script": {**outcome.as_json("failed"), "seconds": 1.0}}, "gpu_check.txt")
    assert all(f"[rank {rank}, exit code 2] error: no kernels for rank {rank}" in text for rank in range(4))


@pytest.mark.gloo
def test_the_part_script_runs_the_training_script_and_keeps_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "RUNS", [run for run in script.RUNS if run.is_profiled])
    outcome = Outcome(folder=tmp_path)
    script.run(Deadline(600.0), outcome)
    assert outcome.failures == outcome.late == [] and len(outcome.measured["1.3B, stage 3, with a trace"]) == script.FEW_STEPS
    with gzip.open(tmp_path / "trace.json.gz") as trace:
        assert len(json.load(trace)["traceEvents"]) > 100
    assert any("forward-backward" in line for line in outcome.lines)


@pytest.mark.gloo
@pytest.mark.long
def test_the_part_script_trains_with_zeropp_and_lean_on_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "RUNS", [run for run in script.RUNS if run.ranks > 1])
    outcome = Outcome(folder=tmp_path)
    script.run(Deadline(600.0), outcome)
    assert outcome.failures == outcome.late == [] and len(outcome.measured) == 3


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """Programs that are found first, for parts that believe to have a GPU and kernels."""
    for part in (sanitizer, counters):
        monkeypatch.setattr(part, "require_gpu", lambda place: None)
        monkeypatch.setattr(part, "require_kernels", lambda place: None)
    fakes = FakeCommands(tmp_path)
    monkeypatch.setenv("PATH", f"{fakes.folder}{os.pathsep}{os.environ['PATH']}")
    return fakes


def test_the_sanitizer_and_ncu_run_every_kernel_of_the_library_and_none_of_torch() -> None:
    calls = [(codes, op) for codes, op, _ in kernel_program.own_ops(kernel_program.RUN_NUMEL, kernel_program.BLOCK_NUMEL)]
    left_out = {(codes, op) for codes, op, _ in timed_ops(1, 256, 256)} - set(calls)
    assert left_out == {("bf16", "parts of logits, by torch"), ("bf16", "gradient of logits, by torch")}


def test_every_tool_of_the_sanitizer_runs_every_kernel_and_what_it_finds_is_a_failure(tmp_path: Path, on_a_gpu: FakeCommands) -> None:
    on_a_gpu.add("compute-sanitizer", 'print("========= Invalid __global__ write"); sys.exit(9 * ("racecheck" in words))')
    outcome = Outcome(folder=tmp_path)
    sanitizer.run(Deadline(600.0), outcome)
    calls = on_a_gpu.calls("compute-sanitizer")
    assert [call.words[1] for call in calls] == ["memcheck", "racecheck"] and calls[0].words[-3:] == [*sanitizer.PROGRAM, "sanitizer"]
    assert calls[0].environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert outcome.failures == ["racecheck finds nothing in any kernel (exit code 9)"]
    assert (tmp_path / "racecheck.txt").read_text() == "========= Invalid __global__ write\n"


CSV = (
    '==PROF== Connected to process 1\\n"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\\n'
    '"0","encode","GPU Speed Of Light Throughput","DRAM Throughput","%","91.5"\\n'
    '"0","encode","GPU Speed Of Light Throughput","Duration","us","40.1"\\n'
    '"1","decode, mean","Launch Statistics","Registers Per Thread","register/thread","40"\\n'
)


def counted(fakes: FakeCommands, folder: Path, calls: str, log: str, code: int = 0) -> Outcome:
    """The part with an ncu that prints these calls and leaves this log."""
    fakes.add("ncu", f"print('{calls}'); open(words[words.index('--log-file') + 1], 'w').write('{log}'); sys.exit({code})")
    outcome = Outcome(folder=folder)
    counters.run(Deadline(600.0, lambda: 0.0), outcome)
    return outcome


def test_the_counters_of_every_kernel_become_a_line_with_the_call_that_started_it(tmp_path: Path, on_a_gpu: FakeCommands) -> None:
    kernels = ["encode, Duration 40.1 us, DRAM Throughput 91.5 %", "decode, mean, Registers Per Thread 40 register/thread"]
    outcome = counted(on_a_gpu, tmp_path, "INT8, encode\\nINT8, decode", CSV)  # two of 42 calls
    assert outcome.lines[:2] == [f"INT8, encode: {kernels[0]}", f"INT8, decode: {kernels[1]}"]
    assert outcome.failures == [] and "counted 2 kernels" in outcome.lines[-1]
    assert outcome.late == ["the last 40 calls"]
    assert on_a_gpu.calls("ncu")[0].words[-4:] == [*counters.PROGRAM, "counters", "560"]  # ncu that is killed writes nothing
    outcome = counted(on_a_gpu, tmp_path, "INT8, encode", CSV)
    assert outcome.lines[:4] == [*kernels, "the calls, in their order:", "INT8, encode"]


def test_why_ncu_counts_nothing_is_said(tmp_path: Path, on_a_gpu: FakeCommands) -> None:
    refusal = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    outcome = counted(on_a_gpu, tmp_path, "INT8, encode", f"==PROF== Connected to process 1\\n{refusal}", code=1)
    assert outcome.lines[0] == refusal and outcome.failures == ["ncu has counted 0 kernels (exit code 1)"]


@pytest.mark.parametrize("part", [sanitizer, counters])
def test_without_its_program_a_part_is_not_done(part: Any, on_a_gpu: FakeCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(on_a_gpu.folder))
    with pytest.raises(NotDone, match="is not on PATH"):
        part.run(Deadline(60.0), Outcome())
