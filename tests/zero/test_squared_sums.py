"""Sums of squares: those of exact arithmetic within fp64 rounding, by every way of adding, and the same bits in every stage."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from harness.small_engine import ROWS, Job, Rank
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.zero import norms, optimizer_step
from megatron_zpp.zero.norms import SquaredSums, squared_sums_at_once, squared_sums_by_chunks, squared_sums_for

CPU = torch.device("cpu")
WAYS = [squared_sums_by_chunks, squared_sums_at_once]
NUMELS = [[96, 1], [4000], [], [32, 64, 2500]]


def units() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(numel, generator=generator) * 10.0 ** (3 * index) for numel in numels] for index, numels in enumerate(NUMELS)]


@pytest.mark.parametrize("way", WAYS)
def test_each_units_sum_is_the_exact_one_within_fp64_rounding(way: SquaredSums) -> None:
    for found, parts in zip(way(units(), CPU).tolist(), units(), strict=True):
        exact = sum(Fraction(value) ** 2 for part in parts for value in part.tolist())
        assert found == pytest.approx(float(exact), rel=5e3 * 2**-53)  # a rounding per element, and those of a root and its square


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_does_not_depend_on_the_units_beside_it(way: SquaredSums) -> None:
    assert way(units(), CPU).tolist() == [way([parts], CPU).item() for parts in units()]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("way", WAYS)
def test_one_bad_element_makes_its_units_sum_not_finite_and_no_other(way: SquaredSums, bad: float) -> None:
    spoilt = units()
    spoilt[3][1][17] = bad
    assert way(spoilt, CPU).isfinite().tolist() == [True, True, True, False]


def test_a_gpu_adds_all_units_at_once_and_a_cpu_chunk_by_chunk() -> None:
    assert [squared_sums_for(torch.device(device), "torch") for device in ("cuda", "cpu")] == [squared_sums_at_once, squared_sums_by_chunks]


def test_tensors_too_long_for_one_kernel_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = squared_sums_at_once(units(), CPU).tolist()
    monkeypatch.setattr(norms, "_LARGEST_NUMEL", 1000)
    assert squared_sums_at_once(units(), CPU).tolist() == pytest.approx(whole, rel=5e3 * 2**-53)


@pytest.mark.virtual
def test_every_row_gives_the_same_norm_when_all_units_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_step, "squared_sums_for", lambda *_: squared_sums_at_once)
    histories = [run_world((2, 2), lambda backend, policy=policy: Rank(Job(policy), backend).train()) for policy in ROWS.values()]
    assert all(history == histories[0] for history in histories)


def test_no_more_than_one_chunk_is_held_in_fp64_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    double, dot = Tensor.double, torch.dot

    def noted_double(tensor: Tensor) -> Tensor:
        held.append(tensor.numel())
        return double(tensor)

    def noted_dot(first: Tensor, second: Tensor) -> Tensor:
        assert held == [first.numel()] and first.numel() <= 100
        held.clear()
        return dot(first, second)

    monkeypatch.setattr(norms, "CHUNK_NUMEL", 100)
    monkeypatch.setattr(Tensor, "double", noted_double)
    monkeypatch.setattr(torch, "dot", noted_dot)
    squared_sums_by_chunks(units(), CPU)
