"""Every file in benchmarks/results says how it was made: command, machine, versions and date."""

from __future__ import annotations

import json
import re
import shlex
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from harness.places import ROOT

from benchmarks import paper_table
from benchmarks.report import ORIGIN, commands_of, machine_text, origin, origin_with
from benchmarks.slow_links.analysis import analyse
from benchmarks.slow_links.configurations import Workload
from benchmarks.slow_links.record import Record
from benchmarks.slow_links.report import markdown
from megatron_zpp import __version__

pytestmark = pytest.mark.pure

FOLDER = ROOT / "benchmarks" / "results"
FILES = sorted(FOLDER.glob("*.json"))
FLAG = re.compile(r'add_argument\(\s*"(--[\w-]+)"')


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_of_results_has_command_machine_versions_and_date(path: Path) -> None:
    results = read(path)
    assert list(results)[: len(ORIGIN)] == list(ORIGIN)
    assert results["machine"]["processor"] and results["machine"]["cores"] > 0
    assert set(results["versions"]) <= {"python", "torch", "megatron_zpp"}
    date.fromisoformat(results["date"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_command_of_a_file_of_results_runs_a_program_with_flags_that_it_knows(path: Path) -> None:
    assert commands_of(read(path))
    for command in commands_of(read(path)):
        python, option, module, *arguments = shlex.split(command)
        known = FLAG.findall((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        flags = {word for word in arguments if word.startswith("--") and " " not in word}
        assert (python, option) == ("python", "-m") and flags <= set(known)


def test_a_program_writes_the_origin_that_files_of_results_must_have() -> None:
    made = origin("reshard", ["--model", "--num-layers 2"])
    assert tuple(made) == ORIGIN and made["command"] == "python -m benchmarks.reshard --model '--num-layers 2'"
    assert set(made["machine"]) == {"processor", "cores", "memory_gib"} and set(made["versions"]) == {"python", "torch", "megatron_zpp"}
    assert date.fromisoformat(made["date"]) and made["versions"]["megatron_zpp"] == __version__
    assert f"torch {made['versions']['torch']}" in machine_text(made)


def test_results_that_two_commands_made_on_two_machines_have_both() -> None:
    first = {"command": "a", "machine": {"processor": "Xeon", "cores": 2}, "date": "1"}
    once = origin_with({}, first)
    assert once == origin_with(once, once) == first
    both = origin_with(once, {"command": "b", "machine": {"processor": "EPYC", "cores": 4}, "date": "2"})
    assert both == {"command": ["a", "b"], "machine": {"processor": "Xeon or EPYC", "cores": 4}, "date": "2"}
    assert origin_with(both, first)["machine"]["processor"] == "Xeon or EPYC"


def test_no_kernel_spills_registers() -> None:
    rows = [line.split(" | ") for line in (FOLDER / "cuda_kernels.md").read_text(encoding="utf-8").splitlines() if line.startswith("| sm_")]
    assert rows and {spilled for *_, spilled, _ in rows} == {"0"}


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(FOLDER.glob("two_nodes_*.md")), ids=lambda path: path.name)
def test_the_tables_over_slow_links_are_those_of_their_measurement(path: Path) -> None:
    record, workload = measured(path)
    assert path.read_text(encoding="utf-8") == markdown(record, workload, analyse(record, workload)), "run two_nodes.py --report-only"


def measured(path: Path) -> tuple[Record, Workload]:
    """The rounds of a measurement over slow links, and what its ranks trained."""
    file = path.with_suffix(".json")
    return Record(file, {}, starts_anew=False), Workload.of_subject(read(file)["subject"])


@pytest.mark.long
def test_the_table_beside_the_paper_is_what_the_program_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["paper_table.py"])
    paper_table.main()
    assert capsys.readouterr().out == (FOLDER / "paper_table.md").read_text(encoding="utf-8")
