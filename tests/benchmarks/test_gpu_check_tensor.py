"""The part `tensor` of benchmarks/gpu_check.py: its comparison of bits on fake streams, and what it says of times."""

from __future__ import annotations

from typing import Any

import pytest
from harness.fake_streams.accesses import RaceError
from harness.fake_streams.machine import Machine
from harness.fake_streams.one_gpu import run_on_one_fake_gpu

from benchmarks.gpu import tensor, tensor_program
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.tensor_program import compare_sums
from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.parallel.grid import Grid
from testbed.session import RankPlace

TIMES = {"product": 4e-3, "sum": 2e-3, "one after the other": 6e-3, "beside each other": 4.2e-3}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_program, "SHAPES", ((2, 8), (6, 40)))


def compared(place: RankPlace, machine: Machine) -> tuple[list[str], int]:
    found = compare_sums(place)
    machine.synchronize()
    return found


@pytest.mark.virtual
def test_all_sums_and_gathers_are_right_on_fake_streams_and_every_wait_of_the_link_is_needed() -> None:
    grid = Grid.of_nodes(1, 4, 2)
    results, needed = run_on_one_fake_gpu(grid, compared)
    assert results == [([], 3 * 2 * (2 * 3 + 2))] * 4
    sites = [site for site in needed if site.file == "operation.py"]
    assert len(sites) >= 3
    for site in sites:
        with pytest.raises(RaceError):
            run_on_one_fake_gpu(grid, compared, without=site)


@pytest.mark.virtual
def test_a_wrong_sum_on_one_rank_is_named_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    summed = TensorLink.summed

    def wrong_on_rank_1(link: TensorLink, values: Any) -> Any:
        return summed(link, values) + (link.rank == 1 and values.shape == (2, 8))

    monkeypatch.setattr(TensorLink, "summed", wrong_on_rank_1)
    results, _ = run_on_one_fake_gpu(Grid.of_nodes(1, 4, 2), compared)
    assert [wrong for wrong, _ in results] == [[f"summed of [2, 8] torch.{name}" for name in ("float32", "bfloat16", "float16")]] * 4


@pytest.mark.parametrize(("beside", "failures"), [(4.2e-3, 0), (5.5e-3, 1)])
def test_a_sum_that_does_not_hide_behind_a_product_is_a_failure(beside: float, failures: int) -> None:
    outcome = Outcome()
    tensor.report(outcome, {"wrong": [], "compared": 84, "seconds": {**TIMES, "beside each other": beside}}, is_timed=True)
    assert len(outcome.failures) == failures and outcome.omissions == []


def test_wrong_bits_are_a_failure_and_times_of_ranks_that_share_a_gpu_are_left_out() -> None:
    outcome = Outcome()
    tensor.report(outcome, {"wrong": ["summed of [2, 8]"], "compared": 84, "seconds": TIMES}, is_timed=False)
    assert len(outcome.failures) == 1 and "not summed of [2, 8]" in outcome.failures[0] and len(outcome.omissions) == 1
