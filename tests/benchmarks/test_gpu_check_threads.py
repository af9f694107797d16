"""The part `threads` of benchmarks/gpu_check.py on streams of the model machine, whose ranks share one GPU there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.fake_streams.accesses import RaceError
from harness.fake_streams.machine import Machine, Site
from harness.fake_streams.one_gpu import run_on_one_fake_gpu
from torch import nn

from benchmarks.gpu import delays, threads
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.delays import DelayedLanes, Delays, delay_computation
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.threads import ALL_OF_ZEROPP, DEAF, RUNS, SEQUENCE, TENSOR, WITHOUT_HPZ, ZERO_3, Bits, Run
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import Use
from testbed.session import RankPlace

pytestmark = pytest.mark.virtual

CPU = torch.device("cpu")
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --vocab-size 40 --make-vocab-size-divisible-by 8 "
    "--micro-batch-size 1 --mock-data --train-iters 10 --attention-dropout 0 --quantization-block-size 32"
)
SHORT = (
    ZERO_3,
    ZERO_3.delayed(1),
    *(run for run in RUNS if run.name in ("ZeRO-0", "ZeRO-3, recomputation, delays")),
    WITHOUT_HPZ,
    replace(ALL_OF_ZEROPP, name="all of ZeRO++, delays", delay_seed=2),
    SEQUENCE,
    *(run for run in RUNS if run.name == "ZeRO-3, sequence parallelism, recomputation, delays"),
)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SHAPE", TINY)


class FakeGpu:
    """Runs programs on ranks that share a GPU of the model machine. needed: see run_on_one_fake_gpu."""

    def __init__(self, without: Site | None = None) -> None:
        self.needed: set[Site] = set()
        self.longest = 0.0
        self._without = without
        self._machines: dict[int, Machine] = {}

    def sleep(self, seconds: float) -> None:
        """Makes the current stream of the calling rank wait in simulated time."""
        self._of_thread().spend(seconds)

    def run_ranks(self, grid: Grid, device: torch.device, program: Callable[[RankPlace], Bits]) -> list[Bits]:
        results, needed = run_on_one_fake_gpu(grid, partial(self._on_rank, program), without=self._without)
        self.needed |= needed
        return results

    def _on_rank(self, program: Callable[[RankPlace], Bits], place: RankPlace, machine: Machine) -> Bits:
        self._machines[threading.get_ident()] = machine
        result = program(place)
        self.longest = max(self.longest, machine.compute.free_at)
        return result

    def _of_thread(self) -> Machine:
        return self._machines[threading.get_ident()]


def short(run: Run) -> Run:
    """The same run on half as many samples, and with as many heads as divided samples need."""
    heads = f" --num-attention-heads {run.context_ranks}" if run.context_ranks > 2 else ""
    return replace(run, flags=run.flags.replace("--global-batch-size 16", "--global-batch-size 8") + heads)


def compared(gpu: FakeGpu, runs: tuple[Run, ...], seconds: float = 1e6) -> Outcome:
    outcome = Outcome()
    threads.compare_runs(Deadline(seconds, lambda: 0.0), outcome, [short(run) for run in runs], CPU, gpu.run_ranks, gpu.sleep)
    return outcome


def test_the_threads_part_finds_equal_bits_and_no_race_on_fake_streams() -> None:
    gpu = FakeGpu()
    outcome = compared(gpu, SHORT)
    assert outcome.failures == []
    assert len(outcome.measured["runs"]) == len(SHORT)
    delayed = [found for name, found in outcome.measured["runs"].items() if "delays" in name]
    assert len(delayed) == 4 and all(found["delays"] > 10 for found in delayed)
    assert gpu.longest > 0.01  # simulated seconds of sleep


def test_delays_come_before_a_hop_is_prepared_and_landed_and_before_computation_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(delays, "CHANCE", 1.0)
    delay = Delays(lambda seconds: order.append("delay"), 1, 1e-3)
    hop: Any = SimpleNamespace(prepare=lambda: order.append("prepare"), land=lambda: order.append("land"))
    inner: Any = SimpleNamespace(submit=lambda hop: (hop.prepare(), hop.land()))
    DelayedLanes(inner, delay).submit(hop)
    assert order == ["delay", "prepare", "delay", "land"]
    model = nn.Sequential(nn.Linear(1, 1))
    delay_computation(model, (Use("0", (), needs_weights_in_backward=True),), delay)
    output = model(torch.ones(1, 1))
    assert order[4:] == ["delay"]
    output.sum().backward()
    assert order[4:] == ["delay", "delay"]


def test_each_wait_between_ranks_is_missed_when_it_has_no_effect() -> None:
    gpu = FakeGpu()
    assert compared(gpu, (ZERO_3,)).failures == []
    between_ranks = [site for site in gpu.needed if site.file == "thread_ranks.py"]
    assert len(between_ranks) >= 3
    for site in between_ranks:
        with pytest.raises(RaceError):
            run_on_one_fake_gpu(Grid.of_nodes(2, 2), lambda place, machine: threads.train(short(ZERO_3), None, place), without=site)


@pytest.mark.long
def test_runs_of_4_context_ranks_have_equal_bits_and_no_race_on_fake_streams() -> None:
    runs = tuple(run for run in RUNS if run.context_ranks > 1)
    outcome = compared(FakeGpu(), runs)
    assert outcome.failures == [] and len(outcome.measured["runs"]) == len(runs) == 3


@pytest.mark.long
def test_runs_of_2_tensor_ranks_have_equal_bits_and_no_race_on_fake_streams() -> None:
    runs = tuple(run for run in RUNS if run.tensor_ranks > 1)
    outcome = compared(FakeGpu(), runs)
    assert outcome.failures == [] and len(outcome.measured["runs"]) == len(runs) == 8


@pytest.mark.parametrize("run", [pytest.param(TENSOR, marks=pytest.mark.long), SEQUENCE], ids=lambda run: run.name)
def test_each_wait_for_the_tensor_link_in_a_run_is_missed_when_it_has_no_effect(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "STEPS", 1)
    gpu = FakeGpu()
    gpu.run_ranks(threads.grid_of(run), CPU, partial(threads.train, short(run), None))
    sites = [site for site in gpu.needed if site.file in ("operation.py", "layers.py", "regions.py")]
    assert {"operation.py", "layers.py"} <= {site.file for site in sites}
    for site in sites:
        with pytest.raises(RaceError):
            run_on_one_fake_gpu(threads.grid_of(run), lambda place, machine: threads.train(short(run), None, place), without=site)


def test_computation_that_does_not_wait_for_lanes_is_a_race() -> None:
    gpu = FakeGpu()
    with pytest.raises(RaceError):
        gpu.run_ranks(Grid.of_nodes(2, 2), CPU, partial(threads.train, DEAF, gpu.sleep))


def outcome_of(of_ranks: Callable[[Run], list[Bits]], made: tuple[Run, ...] = SHORT[:2]) -> Outcome:
    outcome = Outcome()
    runs = iter(made)

    def run_ranks(grid: Grid, device: torch.device, program: Any) -> list[Bits]:
        return of_ranks(next(runs))

    threads.compare_runs(Deadline(1e6, lambda: 0.0), outcome, made, CPU, run_ranks, None)
    return outcome


def bits(last_loss: float = 1.0, weights: str = "w") -> Bits:
    return Bits(((2.0, 1.0), (last_loss, 1.0)), weights)


@pytest.mark.parametrize(
    "of_ranks, failure",
    [
        (lambda run: [bits(), bits(weights="v")], "all ranks have the same weights and losses"),
        (lambda run: [bits(last_loss=2.0)], "'ZeRO-3' trains"),
        (lambda run: [bits(weights=run.name)], "'ZeRO-3, delays 1' has the bits of 'ZeRO-3'"),
    ],
)
def test_bits_that_differ_are_a_failure(of_ranks: Callable[[Run], list[Bits]], failure: str) -> None:
    assert failure in " ".join(outcome_of(of_ranks).failures)


@pytest.mark.parametrize("weights, failures", [("others", 0), ("w", 1)])
def test_delays_that_do_not_show_a_missing_wait_are_a_failure(weights: str, failures: int) -> None:
    outcome = outcome_of(lambda run: [bits(weights=weights if run is DEAF else "w")], (ZERO_3, DEAF))
    assert len(outcome.failures) == failures


def test_a_missing_wait_may_also_show_as_an_error() -> None:
    def of_ranks(run: Run) -> list[Bits]:
        if run is DEAF:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return [bits()]

    outcome = outcome_of(of_ranks, (ZERO_3, DEAF))
    assert outcome.failures == [] and "shows that a wait is missing" in outcome.lines[-3] + outcome.lines[-2]
    assert RUNS[-1] is DEAF


def test_a_run_that_raises_is_a_failure_and_the_next_still_runs() -> None:
    def of_ranks(run: Run) -> list[Bits]:
        if run is ZERO_3:
            raise RuntimeError("a rank has failed")
        return [bits()]

    outcome = outcome_of(of_ranks)
    assert len(outcome.failures) == 1 and "RuntimeError: a rank has failed" in outcome.failures[0]
    assert "ZeRO-3, delays 1" in outcome.measured["runs"]


def test_after_an_error_of_the_device_no_further_run_is_tried() -> None:
    def of_ranks(run: Run) -> list[Bits]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    outcome = outcome_of(of_ranks)
    assert len(outcome.failures) == 1 and "nothing more can run" in " ".join(outcome.lines)


def test_without_time_the_first_run_is_made_and_the_others_are_named() -> None:
    outcome = compared(FakeGpu(), SHORT[:3], seconds=1.0)
    assert list(outcome.measured["runs"]) == ["ZeRO-3"] and outcome.late == ["run 'ZeRO-3, delays 1'", "run 'ZeRO-0'"]
