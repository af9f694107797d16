"""Fake GPUs, which need torch with CUDA, and what was measured with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from harness import forked
from harness.places import ROOT

from benchmarks import gpu_host_path
from benchmarks.fake_gpu.counts import HOST_WAIT
from benchmarks.gpu_host_path import CASES
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.members import PlannedWorld
from megatron_zpp.training.run_plan import plan_as_given

pytestmark = pytest.mark.pure

FILE = ROOT / "benchmarks" / "results" / "gpu_host_path.json"
RECORDED: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["measured"]
PADDED_VOCABULARY = 50304
LEAST, MOST = 0.99, 1.01


@pytest.mark.parametrize("program", ["fake_gpus", "gpu_host_path"])
def test_a_torch_without_cuda_is_refused_with_a_remedy(program: str) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    ended = forked.run("-m", f"benchmarks.{program}", *(["true"] if program == "fake_gpus" else []))
    assert ended.returncode == 2 and ended.stdout == ""
    assert "is not built for CUDA 13" in ended.stderr and "pip install torch" in ended.stderr and "Traceback" not in ended.stderr


def test_every_case_was_measured() -> None:
    assert [one["name"] for one in RECORDED] == [case.name for case in CASES]


@pytest.mark.parametrize(("case", "run"), list(zip(CASES, RECORDED, strict=True)), ids=[case.name for case in CASES])
def test_the_plan_of_a_recorded_run_is_that_of_today_and_near_the_peak_of_torch_s_allocator(
    case: gpu_host_path.Case, run: dict[str, Any]
) -> None:
    world = PlannedWorld(case.nodes, case.ranks_per_node, is_on_gpu=True)
    ranks = case.nodes * case.ranks_per_node
    need = plan_as_given(resolve(parse_flags(case.all_flags.split()), ranks, case.ranks_per_node), world, PADDED_VOCABULARY).memory
    assert run["planned_bytes"] == need.beside(need.device).total
    assert LEAST * run["peak_bytes"] <= run["planned_bytes"] <= MOST * run["peak_bytes"]


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: run["name"])
def test_the_host_waits_once_per_step_unless_it_computes_the_update(run: dict[str, Any]) -> None:
    assert HOST_WAIT not in run["calls_in_backward"] or "optimizer on the host" in run["name"]
    assert run["calls"][HOST_WAIT] == 1 or "optimizer on the host" in run["name"]
