"""The parts of benchmarks/gpu_check.py that start ranks as processes, on the CPU over gloo."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.tiny_runs import TINY

from benchmarks.gpu import entry_runs, lost_rank, nccl, resume, several_gpus, tensor
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.entry_runs import Entry, Finished, run_entries
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.rank_processes import ONE_GPU_EACH
from benchmarks.gpu.training import CPU_SHAPE, FLAGS

pytestmark = pytest.mark.gloo

TINY_FLAGS = f"{CPU_SHAPE} {FLAGS}"


@pytest.fixture
def outcome() -> Outcome:
    return Outcome()


def test_a_rank_runs_the_training_script_several_times_in_one_process() -> None:
    entries = [Entry(name, f"{' '.join(TINY)} --train-iters 2 {flags}") for name, flags in (("one", ""), ("two", "--zero-stage 3"))]
    first, second = run_entries(entries, 1, ONE_GPU_EACH, Deadline(300.0), run_seconds=120.0)
    assert first.errors == second.errors == [] and len(first.losses) == 2 and first.losses == second.losses


@pytest.mark.long
def test_the_part_nccl_has_equal_bits_over_gloo(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "RUNS", [*nccl.RUNS[:6], *(run for run in nccl.RUNS if "tensor" in run.flags or "context" in run.flags)])
    nccl.run(Deadline(600.0), outcome)
    assert outcome.failures == outcome.late == [] and len(outcome.measured["losses"]) == 14


@pytest.mark.long
def test_the_part_resume_has_equal_bits_on_one_rank(outcome: Outcome, tmp_path: Path) -> None:
    resume.check_runs(Deadline(600.0), outcome, tmp_path, 1, ONE_GPU_EACH)
    assert outcome.failures == outcome.late == [] and len(outcome.lines) == 15


@pytest.mark.long
def test_the_part_lost_rank_finds_that_the_others_end(outcome: Outcome) -> None:
    lost_rank.run(Deadline(300.0), outcome)
    assert outcome.failures == outcome.late == [] and outcome.measured["exit_codes"][lost_rank.LOST] == -9


@pytest.mark.long
def test_the_part_several_gpus_measures_two_ranks(outcome: Outcome) -> None:
    several_gpus.measure(Deadline(300.0), outcome, 2, TINY_FLAGS, ("", "4"))
    assert outcome.failures == outcome.late == [] and len(outcome.measured) == 2


@pytest.mark.long
def test_the_part_tensor_finds_the_bits_of_sums_over_gloo(outcome: Outcome) -> None:
    tensor.measure(Deadline(300.0), outcome, ONE_GPU_EACH, is_timed=False)
    assert outcome.failures == outcome.late == [] and len(outcome.measured["seconds"]) == 4


def test_ranks_that_run_when_the_time_is_over_are_late_and_no_failure(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_gpus, "SECONDS_PER_LIMIT", 0.0)
    several_gpus.measure(Deadline(0.0), outcome, 2, TINY_FLAGS, ("4",))
    tensor.measure(Deadline(0.0), outcome, ONE_GPU_EACH, is_timed=False)
    assert outcome.failures == []
    assert outcome.late == ["the end of 2 ranks with NCCL_MAX_CTAS=4", "the end of 4 ranks that use their tensor links"]


@pytest.mark.long
def test_a_run_that_the_flags_forbid_is_a_failure_with_its_message() -> None:
    entries = [Entry("wrong", "--no-such-flag")]
    (found,) = run_entries(entries, 1, ONE_GPU_EACH, Deadline(300.0), run_seconds=120.0)
    assert any("--no-such-flag" in line for line in found.errors) and entry_runs.PROGRAM[-1].endswith("rank_program")


@pytest.mark.parametrize("norm, slack, failures", [(1.0, 0.0, 0), (1.001, 0.0, 1), (1.001, 0.01, 0), (1.02, 0.01, 1), (math.nan, 0.01, 1)])
def test_losses_and_norms_are_compared_bit_for_bit_unless_there_is_slack(
    norm: float, slack: float, failures: int, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finished(entries: list[Entry], *_: object, **__: object) -> Iterator[Finished]:
        for entry, last in zip(entries, (1.0, norm), strict=True):
            yield Finished(entry, [{"lm_loss": 4.0, "grad_norm": 1.0}, {"lm_loss": 2.0, "grad_norm": last}], [])

    monkeypatch.setattr(nccl, "run_entries", finished)
    runs = (nccl.Run("one", ""), nccl.Run("other", "", "one"))
    nccl.compare_runs(Deadline(300.0), outcome, runs, ONE_GPU_EACH, {}, {}, slack)
    assert len(outcome.failures) == failures
