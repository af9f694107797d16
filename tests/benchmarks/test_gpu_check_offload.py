"""The part `offload` of benchmarks/gpu_check.py at tiny size, and what it says of losses, bytes and times."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu import offload
from gpu.deadline import Deadline
from gpu.outcome import Outcome
from gpu.place import Place

CPU = Place(torch.device("cpu"), is_tiny=True)


def run(seconds: float = 1e6) -> Outcome:
    outcome = Outcome()
    offload.run(Deadline(seconds, lambda: 0.0), outcome)
    return outcome


def test_on_a_cpu_losses_are_equal_bytes_are_those_of_the_plan_and_copies_are_left_out() -> None:
    outcome = run()
    assert outcome.failures == [] and any("host link" in omitted for omitted in outcome.omissions)
    for name in offload.ROWS:
        plain, offloaded = outcome.measured[name]["plain"], outcome.measured[name]["offloaded"]
        assert plain["losses"] == offloaded["losses"] and len(plain["losses"]) == offload.STEPS
        assert plain["host_bytes"] == 0 < offloaded["host_bytes"] and offloaded["device_bytes"] < plain["device_bytes"]


def test_without_time_it_names_what_it_leaves_out() -> None:
    outcome = run(seconds=1.0)
    assert len(outcome.late) == len(offload.ROWS) and outcome.failures == []


def test_losses_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = offload.train

    def spoiled(outcome: Outcome, place: Place, flags: str) -> offload.Trained:
        trained = right(outcome, place, flags)
        factor = 1.01 if offload.OFFLOAD in flags else 1.0
        return dataclasses.replace(trained, losses=[factor * loss for loss in trained.losses])

    monkeypatch.setattr(offload, "train", spoiled)
    outcome = Outcome()
    offload.compare(outcome, CPU, "stage 2", offload.ROWS["stage 2"])
    assert len(outcome.failures) == 1


@pytest.mark.parametrize(("together", "failures"), [(1.05, 0), (1.5, 1), (2.0, 1)])
def test_copies_that_do_not_hide_behind_products_are_a_failure(together: float, failures: int) -> None:
    outcome = Outcome()
    offload.report_overlap(outcome, copying=1.0, multiplying=1.0, together=together)
    assert len(outcome.failures) == failures
