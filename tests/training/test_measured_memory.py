"""Plans of memory, against the peaks of CPU ranks that benchmarks/long_sequences.py has measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.places import ROOT

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.run_plan import PlannedWorld, plan_as_given

pytestmark = pytest.mark.pure


LONG: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "long_sequences.json").read_text(encoding="utf-8"))
MOST = 1.05


@pytest.mark.parametrize("run", LONG["measured"], ids=lambda run: f"{run['tokens']} tokens on {run['ranks']} ranks")
def test_the_plan_of_a_recorded_run_is_never_below_the_measured_peak_and_at_most_5_percent_above_it(run: dict[str, Any]) -> None:
    ranks = run["ranks"]
    flags = f"{LONG['model']} --seq-length {run['tokens']} --context-parallel-size {ranks} --ranks-per-node {ranks}"
    need = plan_as_given(resolve(parse_flags(flags.split()), ranks, ranks), PlannedWorld(1, ranks, is_on_gpu=False), 512).memory
    assert run["planned_bytes"] == need.in_step
    assert run["peak_bytes"] <= run["planned_bytes"] <= MOST * run["peak_bytes"]
