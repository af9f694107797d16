"""docs/memory.md: the figures of its example are those of the plan."""

from __future__ import annotations

import re

import pytest
from drawing.memory import plan_of
from harness.places import ROOT

from megatron_zpp.config.counted import in_gib
from megatron_zpp.training.hardware import GIGABYTE, TERA, planned_machine

pytestmark = pytest.mark.pure

PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").split("## An example")[1]
ROWS = re.findall(r"^\| `(--[^`]+)` \| ([\d.]+ .iB) \| ([\d.]+ .iB) \| (yes|no) \|$", PAGE, re.MULTILINE)
TIMES = re.findall(r"^\| (none|`--[^`]+`) \| (\d+) \| ([\d.]+ .iB)(, does not fit)? \| ([\d.]+) \|$", PAGE, re.MULTILINE)


def test_the_example_has_rows() -> None:
    assert len(ROWS) == 7 and {fits for *_, fits in ROWS} == {"yes", "no"}
    assert len(TIMES) == 6


@pytest.mark.parametrize("flags, samples, device, does_not_fit, seconds", TIMES, ids=[f"{row[0]} {row[1]}" for row in TIMES])
def test_each_time_of_the_example_is_that_of_the_plan(flags: str, samples: str, device: str, does_not_fit: str, seconds: str) -> None:
    plan = plan_of(f"--zero-stage 3 --micro-batch-size {samples} {flags.strip('`').removeprefix('none')}")
    time = plan.time(planned_machine(100, 100, 80 * TERA, is_on_gpu=True))
    assert (in_gib(plan.memory.total), f"{time.seconds:.1f}") == (device, seconds)
    assert (plan.memory.total > 24 * GIGABYTE) is bool(does_not_fit)


@pytest.mark.parametrize("flags, device, host, fits", ROWS, ids=[row[0] for row in ROWS])
def test_each_row_of_the_example_is_the_plan_of_its_flags(flags: str, device: str, host: str, fits: str) -> None:
    need = plan_of(flags).memory
    assert (in_gib(need.total), in_gib(need.host)) == (device, host)
    assert (need.total <= 24 * GIGABYTE) is (fits == "yes")
