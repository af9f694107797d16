"""Plans of memory, against peaks that benchmarks have measured: of CPU ranks (long_sequences.py) and of torch's allocator on GPUs
(gpu_host_path.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpu_host_path import CASES, Case
from harness.places import ROOT

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.run_plan import PlannedWorld, plan_as_given
from megatron_zpp.training.setup import build_vocabulary

pytestmark = pytest.mark.pure


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


LONG = recorded("long_sequences")
ON_GPUS = {run["name"]: run for run in recorded("gpu_host_path")["measured"]}
LEAST, MOST = 0.99, 1.05


@pytest.mark.parametrize("run", LONG["measured"], ids=lambda run: f"{run['tokens']} tokens on {run['ranks']} ranks")
def test_the_plan_of_a_recorded_run_is_never_below_the_measured_peak_and_at_most_5_percent_above_it(run: dict[str, Any]) -> None:
    ranks = run["ranks"]
    flags = f"{LONG['model']} --seq-length {run['tokens']} --context-parallel-size {ranks} --ranks-per-node {ranks}"
    need = plan_as_given(resolve(parse_flags(flags.split()), ranks, ranks), PlannedWorld(1, ranks, is_on_gpu=False), 512).memory
    assert run["planned_bytes"] == need.in_step
    assert run["peak_bytes"] <= run["planned_bytes"] <= MOST * run["peak_bytes"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_plan_of_a_run_on_gpus_is_the_peak_of_the_allocator_within_a_hundredth_less_and_a_twentieth_more(case: Case) -> None:
    run, size = ON_GPUS[case.name], case.nodes * case.ranks_per_node
    config = resolve(parse_flags(case.all_flags.split()), size, case.ranks_per_node)
    world = PlannedWorld(case.nodes, case.ranks_per_node, is_on_gpu=True)
    need = plan_as_given(config, world, build_vocabulary(config).padded_size).memory
    assert run["planned_bytes"] == need.beside(need.device).total
    assert LEAST * run["peak_bytes"] <= run["planned_bytes"] <= MOST * run["peak_bytes"]
