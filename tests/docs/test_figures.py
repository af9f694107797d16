"""Every measured number of the pages is the one that stands in benchmarks/results, or that a plan gives."""

from __future__ import annotations

import ast
import re
import statistics
from dataclasses import asdict

import pytest
from figures import of_loss, of_plans, of_programs, of_speed
from figures.covered import ELSEWHERE, NOT_MEASURED
from figures.figure import Elsewhere, NotMeasured, as_one_line, left_over, prose_of, text_of
from harness.places import ROOT

from megatron_zpp.training.hardware import CPU_CODEC, GPU_CODEC

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
    def integers(op: str, members: int = 1) -> float:
        return statistics.median(2 / rate / members for rate in of_programs.of_kernels("gigabytes_per_second", op, least=16))

    def gaussian(op: str, rounds: str) -> float:
        return statistics.mean(of_programs.gaussian("nanoseconds_per_value", rounds, op))

    rotate = statistics.mean(gaussian(op, "2 rounds") - gaussian(op, "1 round") for op in ("encode", "decode to bf16"))
    measured = {
        "encode": integers("encode"),
        "decode": integers("decode to bf16"),
        "summed": statistics.mean(integers(f"decode, add mean of {members}", members) for members in (2, 4)),
        "gaussian_encode": gaussian("encode", "1 round") - rotate,
        "gaussian_decode": gaussian("decode to bf16", "1 round") - rotate,
        "rotate": rotate,
        "subtract": 0.5,  # an estimate
    }
    assert {name: round(1e9 * seconds, 2) for name, seconds in asdict(CPU_CODEC).items()} == pytest.approx(measured, abs=0.0051)


def test_the_speeds_of_a_gpu_that_plans_assume_are_those_that_were_measured_on_an_h100() -> None:
    kernels = of_programs.results("gpu_h100")["kernels"]

    def picoseconds(op: str, kind: str) -> float:
        """Per bf16 value, the mean of all codes of a kind that have the call."""
        values = 64 * 2**20 / 2
        return statistics.mean(1e6 * one["microseconds"] / values for one in kernels if one["op"] == op and one["codes"].startswith(kind))

    rotate = picoseconds("encode rotated bf16", "INT") - picoseconds("encode bf16", "INT")
    rounds = statistics.mean((1, 2))  # of the two Gaussian codes that are timed
    measured = {
        "encode": picoseconds("encode bf16", "INT"),
        "decode": picoseconds("decode to bf16", "INT"),
        "summed": picoseconds("decode, add mean of 2", "INT") / 2,
        "gaussian_encode": picoseconds("encode bf16", "Gaussian") - rounds * rotate,
        "gaussian_decode": picoseconds("decode to bf16", "Gaussian") - rounds * rotate,
        "rotate": rotate,
        "subtract": 3.5,  # an estimate
    }
    assert {name: 1e12 * seconds for name, seconds in asdict(GPU_CODEC).items()} == pytest.approx(measured, abs=0.051)


def test_each_figure_is_there_once() -> None:
    assert len({(figure.page, figure.text) for figure in FIGURES}) == len(FIGURES)
