"""The part `offload` of benchmarks/gpu_check.py at tiny size, and what it says of losses, bytes and times."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness.fake_streams.machine import Machine

from benchmarks.gpu import kept_on_host, offload
from benchmarks.gpu.beside import report_overlap
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place

CPU = Place(torch.device("cpu"), is_tiny=True)
GPU = Place(torch.device("cuda"), is_tiny=False)


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
        assert offloaded["update_seconds"] > 0
    for switch in kept_on_host.SWITCHES:
        assert outcome.measured[switch]["plain"]["losses"] == outcome.measured[switch]["kept"]["losses"]


def test_without_time_it_names_what_it_leaves_out() -> None:
    outcome = run(seconds=1.0)
    assert outcome.late == [*offload.ROWS, "kept inputs"] and outcome.failures == []


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
    report_overlap(outcome, copying=1.0, multiplying=1.0, together=together)
    assert len(outcome.failures) == failures


@pytest.mark.parametrize(
    ("saved", "loss", "failures"),
    [(100, 2.0, 0), (81, 2.0, 0), (79, 2.0, len(kept_on_host.SWITCHES)), (100, 2.01, len(kept_on_host.SWITCHES))],
)
def test_a_peak_that_falls_less_than_planned_and_other_losses_are_failures(saved: int, loss: float, failures: int) -> None:
    def peak_of(flags: str) -> kept_on_host.Peak:
        is_kept = any(switch in flags for switch in kept_on_host.SWITCHES)
        return kept_on_host.Peak(1000 - saved, 900, [1.0, loss]) if is_kept else kept_on_host.Peak(1000, 1000, [1.0, 2.0])

    outcome = Outcome()
    kept_on_host.check_peaks(outcome, dataclasses.replace(GPU, is_tiny=True), peak_of, 1e-3)
    assert len(outcome.failures) == failures


def test_copies_of_kept_inputs_are_timed_in_both_directions_alone_and_beside_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_on_host, "CudaStreams", lambda device: Machine())
    monkeypatch.setattr(kept_on_host, "CHUNK_NUMEL", 1 << 12)
    monkeypatch.setattr(kept_on_host, "PRODUCT_SIZE", 16)
    outcome = Outcome()
    kept_on_host.measure_copies(outcome, CPU)
    for way in ("down", "up"):
        found = outcome.measured[f"kept inputs {way}"]
        assert found["rate"] == pytest.approx(kept_on_host.CHUNKS * (1 << 13) / found["copying"]) and found["together"] > 0
