from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from harness.places import ROOT

from benchmarks import constants
from megatron_zpp.training.hardware import CONSTANTS, Constant

pytestmark = pytest.mark.pure


def test_the_table_has_a_row_for_every_speed_with_what_was_measured_here() -> None:
    table = constants.table({("cpu", "encoded"): 0.25e-9}).splitlines()[2:]
    assert [tuple(line.split(" | ")[:2]) for line in table] == [(f"| {constant.device}", constant.name) for constant in CONSTANTS]
    here = [line.split(" | ")[4] for line in table]
    assert here[0] == "0.25" and set(here[1:]) == {"-"}


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: f"{constant.device}: {constant.name}")
def test_every_speed_is_that_of_one_value_byte_or_collective_and_positive(constant: Constant) -> None:
    assert constant.seconds > 0 and constant.of.startswith(("value", "byte", "collective"))
    assert [(one.device, one.name) for one in CONSTANTS].count((constant.device, constant.name)) == 1


def test_the_speeds_of_a_core_that_plans_assume_are_those_that_were_measured() -> None:
    measured = constants.of_core([*stored("quantization_cpu")["results"], *stored("gaussian_cpu")["results"]])
    assert {name: round(1e9 * assumed("cpu", name), 2) for name in measured} == pytest.approx(in_units(1e-9, measured), abs=0.0051)


def test_the_speeds_of_a_gpu_that_plans_assume_are_those_that_were_measured_on_an_h100() -> None:
    measured = constants.of_gpu(stored("gpu_h100")["kernels"])
    assert {name: 1e12 * assumed("gpu", name) for name in measured} == pytest.approx(in_units(1e-12, measured), abs=0.051)


def test_the_processor_time_of_bytes_over_gloo_that_plans_assume_was_measured() -> None:
    measured = constants.of_sockets(stored("sockets_cpu")["results"])
    for name in ("gathered", "exchanged"):
        assert 1e9 * assumed("cpu", name) == pytest.approx(1e9 * measured[name], abs=0.051)


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: f"{constant.device}: {constant.name}")
def test_every_speed_that_plans_assume_names_the_file_that_it_comes_from_or_is_assumed(constant: Constant) -> None:
    source = constant.source.partition(":")[0]
    assert source == "assumed" or (ROOT / "benchmarks" / "results" / source).exists()


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def assumed(device: str, name: str) -> float:
    return next(one.seconds for one in CONSTANTS if (one.device, one.name) == (device, name))


def in_units(unit: float, seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: value / unit for name, value in seconds.items()}
