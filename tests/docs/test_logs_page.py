"""docs/logs.md: the commands that watch and compare runs do what the page says."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from harness.places import ROOT
from harness.sample_report import REPORT
from harness.tool import run_tool, write_json_lines

from megatron_zpp.monitor.interval_report import IntervalReport

pytestmark = pytest.mark.pure

PAGE = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
COMMANDS = {
    command.split("/")[1].split(".")[0]: command
    for command in re.findall(r"^python tools/.+$", PAGE.split("## Watching and comparing runs")[1], re.MULTILINE)
}


def log(path: Path, report: IntervalReport, losses: list[float]) -> None:
    write_json_lines(path, [report.json_object() | {"iteration": 10 * n, "lm_loss": loss} for n, loss in enumerate(losses, 1)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("my_run", "one", "two"):
        log(tmp_path / f"{name}.jsonl", replace(REPORT, train_iters=30), [6.0, 5.0, 4.0])
    return tmp_path


def in_folder(command: str, folder: Path) -> list[str]:
    """The arguments of a command of the page, with its files in this folder."""
    return [str(folder / word) if re.search(r"\.(jsonl|svg)$", word) else word for word in shlex.split(command)[2:]]


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("watch_run", "iteration 30 of 30, loss 4.0000"),
        ("plot_run", "runs.svg: ZeRO-3, lean"),
        ("compare_runs", "Up to the first line with a training loss of at most 4.5000"),
    ],
)
def test_the_commands_that_watch_and_compare_runs_do_so(folder: Path, tool: str, said: str) -> None:
    done = run_tool(tool, *in_folder(COMMANDS[tool], folder))
    assert done.returncode == 0 and said in done.stdout, done.stderr
    assert (folder / "runs.svg").exists() == (tool == "plot_run")
