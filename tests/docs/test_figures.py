"""Every measured number of the pages is the one that stands in benchmarks/results, or that a plan gives."""

from __future__ import annotations

import ast
import re

import constants
import pytest
from figures import of_loss, of_plans, of_programs, of_speed
from figures.covered import ELSEWHERE, NOT_MEASURED
from figures.figure import Elsewhere, NotMeasured, as_one_line, left_over, prose_of, text_of
from harness.places import ROOT

from megatron_zpp.training.hardware import CONSTANTS, Constant

pytestmark = pytest.mark.pure

FIGURES = (*of_speed.FIGURES, *of_loss.FIGURES, *of_programs.FIGURES, *of_plans.FIGURES)
GENERATED = "docs/flags.md"  # from the declarations of the flags
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")) if f"docs/{path.name}" != GENERATED]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_figures_that_were_measured_or_planned(page: str) -> None:
    missing = [figure.text for figure in FIGURES if figure.page == page and figure.text not in text_of(page)]
    assert not missing, f"{page} should say: {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_every_number_that_looks_measured_is_a_figure_or_has_a_reason_why_not(page: str) -> None:
    covered = [part.text for part in FIGURES if part.page == page] + [part.words for part in NOT_MEASURED if part.page == page]
    left = left_over(prose_of(page), covered, [part.pattern for part in ELSEWHERE if part.page == page])
    assert not left, f"{page}: add figures to tests/docs/figures/of_*.py, or say in covered.py why these are not measured: {left}"


def test_a_number_that_nobody_measured_is_found() -> None:
    for number in ("1.5x", "3 to 4 ms", "0.30 ± 0.19 %", "12 GB/s", "1.56"):
        text = f"Block 7 of 32 takes {number}."
        assert left_over(text, [], []) == [text]
        assert left_over(text, [f"takes {number}"], []) == left_over(text, [], [rf"takes {re.escape(number)}"]) == []
    assert left_over("Block 7 of 32 has 4 heads.", [], []) == []


@pytest.mark.parametrize("part", NOT_MEASURED, ids=lambda part: f"{part.page}: {part.words[:50]}")
def test_what_nobody_measured_is_still_on_its_page(part: NotMeasured) -> None:
    assert as_one_line(part.words) in text_of(part.page)


@pytest.mark.parametrize("part", ELSEWHERE, ids=lambda part: part.test)
def test_numbers_that_another_test_compares_are_on_the_page_and_the_test_exists(part: Elsewhere) -> None:
    assert re.search(part.pattern, prose_of(part.page))
    file, _, name = part.test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_speeds_of_a_core_that_plans_assume_are_those_that_were_measured() -> None:
    rows = [*of_programs.results("quantization_cpu")["results"], *of_programs.results("gaussian_cpu")["results"]]
    measured = constants.of_core(rows)
    assert {name: round(1e9 * assumed("cpu", name), 2) for name in measured} == pytest.approx(in_units(1e-9, measured), abs=0.0051)


def test_the_speeds_of_a_gpu_that_plans_assume_are_those_that_were_measured_on_an_h100() -> None:
    measured = constants.of_gpu(of_programs.results("gpu_h100")["kernels"])
    assert {name: 1e12 * assumed("gpu", name) for name in measured} == pytest.approx(in_units(1e-12, measured), abs=0.051)


def test_the_processor_time_of_bytes_over_gloo_that_plans_assume_was_measured() -> None:
    measured = constants.of_sockets(of_programs.results("sockets_cpu")["results"])
    for name in ("gathered", "exchanged"):
        assert 1e9 * assumed("cpu", name) == pytest.approx(1e9 * measured[name], abs=0.051)


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: f"{constant.device}: {constant.name}")
def test_every_speed_that_plans_assume_names_the_file_that_it_comes_from_or_is_assumed(constant: Constant) -> None:
    source = constant.source.partition(":")[0]
    assert source == "assumed" or (ROOT / "benchmarks" / "results" / source).exists()


def assumed(device: str, name: str) -> float:
    return next(one.seconds for one in CONSTANTS if (one.device, one.name) == (device, name))


def in_units(unit: float, seconds: dict[str, float]) -> dict[str, float]:
    return {name: value / unit for name, value in seconds.items()}


def test_each_figure_is_there_once() -> None:
    assert len({(figure.page, figure.text) for figure in FIGURES}) == len(FIGURES)
