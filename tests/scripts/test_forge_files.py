"""What a public forge reads: the workflow, the hooks of pre-commit, the template of a report, the changes."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.places import ROOT

from megatron_zpp import __version__

pytestmark = pytest.mark.pure

WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"
HOOKS = ROOT / ".pre-commit-config.yaml"
TEST_SCRIPT = (ROOT / "scripts" / "test.sh").read_text()


def workflow() -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    return found


def test_the_workflow_runs_scripts_that_exist_with_versions_of_python_that_the_package_allows() -> None:
    jobs = workflow()["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = [command.split()[1] for command in commands if command.startswith("bash ")]
    assert scripts == ["scripts/test.sh", "benchmarks/gpu_half_hour.sh"]
    assert all((ROOT / script).is_file() for script in scripts)
    matrix = jobs["test"]["strategy"]["matrix"]
    smallest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert smallest is not None
    assert [f"3.{minor}" for minor in range(int(smallest[1]), 15)] == matrix["python"]
    assert matrix["include"] == [{"python": "3.10", "torch": "2.6.0"}] and "torch>=2.6\n" in (ROOT / "requirements.txt").read_text()


def test_the_workflow_puts_another_torch_in_place_of_the_pinned_one() -> None:
    (change,) = (step["run"] for step in workflow()["jobs"]["test"]["steps"] if step.get("name", "").startswith("Put another"))
    pattern, replacement = re.search(r"'s/(.*?)/(.*?)/'", change).groups()  # type: ignore[union-attr]
    constraints = (ROOT / "constraints.txt").read_text()
    assert len(re.findall(pattern, constraints, re.MULTILINE)) == 1
    assert replacement == "torch==${{ matrix.torch }}"


def test_the_hooks_are_the_checks_of_the_test_script() -> None:
    hooks = [hook["entry"] for repo in yaml.safe_load(HOOKS.read_text())["repos"] for hook in repo["hooks"]]
    found = [re.sub(r"^bash -c '(.*)'$", r"\1", hook).replace(".venv/bin/", "") for hook in hooks]
    checks = re.findall(r"^((?:python -m (?:ruff|mypy)|shellcheck|lint-imports).*?)(?: &)?$", TEST_SCRIPT, re.MULTILINE)
    assert found == checks


def test_a_report_has_what_a_run_prints() -> None:
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "report.md").read_text()
    printed = "\n".join(path.read_text() for path in (ROOT / "megatron_zpp").rglob("*.py"))
    for words in ("arguments", "end of arguments"):
        assert words in template and words in printed
    assert "--log-jsonl" in template


def test_the_newest_changes_are_those_of_this_version_with_a_date() -> None:
    text = Path(ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+) \((\S+)\)$", text, re.MULTILINE)
    assert __version__.startswith(f"{versions[0][0]}.")
    dates = [date.fromisoformat(day) for _, day in versions]
    assert dates == sorted(dates, reverse=True) and len(versions) == len(re.findall("^## ", text, re.MULTILINE))
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) == {"Added", "Changed", "Fixed"}
