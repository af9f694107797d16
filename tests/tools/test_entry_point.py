"""The installed command `megatron-zpp`, and what a wheel holds."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import entry_point
import pytest
import yaml
from harness.places import ROOT

import pretrain_zeropp_gpt
from megatron_zpp import __all__, __version__
from megatron_zpp.checkpoint.engine_state import versions
from megatron_zpp.ops.build import INSTALLED_SOURCES, SOURCES, Build

IN_WHEEL = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "requirements.txt", "requirements-dev.txt", "pretrain_zeropp_gpt.py")
PAPERS = {"1910.02054": "ZeRO: ", "2306.10209": "ZeRO++: ", "1909.08053": "Megatron-LM: ", "2309.14509": "DeepSpeed Ulysses: "}


def test_every_program_of_tools_is_a_command() -> None:
    programs = {path.stem for path in (ROOT / "tools").glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    assert set(entry_point.TOOLS) == programs
    assert all(path.is_file() for path in entry_point.PROGRAMS.values())


@pytest.mark.parametrize("tool", entry_point.TOOLS)
def test_a_command_prints_its_flags(tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # programs add to it
    monkeypatch.setattr(sys, "argv", [f"{tool}.py"])
    parser = runpy.run_path(str(ROOT / "tools" / f"{tool}.py"))["_parser"]()
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--help"])
    assert capsys.readouterr().out.startswith(f"usage: {tool}.py ")


def test_the_training_prints_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_zeropp_gpt.main(["--help"]) == 0
    assert "--zero-stage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "program"),
    [("pretrain", "pretrain_zeropp_gpt.py"), ("preprocess-data", "tools/preprocess_data.py"), ("launch", "tools/launch.py")],
)
def test_a_command_becomes_its_program_with_all_further_words(command: str, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append([path, *words]))
    monkeypatch.setattr(sys, "argv", ["megatron-zpp", command, "--help", "--", "-x"])
    entry_point.main()
    assert started == [[sys.executable, sys.executable, str(ROOT / program), "--help", "--", "-x"]]


@pytest.mark.parametrize("words", [[], ["preprocess"], ["--unknown"]])
def test_a_mistake_names_the_command_and_ends_with_exit_code_2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron-zpp", *words])
    with pytest.raises(SystemExit, match="2"):
        entry_point.main()
    assert "error: " in capsys.readouterr().err


def test_help_lists_every_command_with_the_first_sentence_of_its_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron-zpp", "--help"])
    with pytest.raises(SystemExit, match="0"):
        entry_point.main()
    lines = re.findall(r"^  ([a-z-]+) +(\S.*)$", capsys.readouterr().out, re.MULTILINE)
    assert dict(lines).keys() >= entry_point.PROGRAMS.keys()


def test_the_version_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron-zpp", "--version"])
    with pytest.raises(SystemExit, match="0"):
        entry_point.main()
    assert capsys.readouterr().out == f"megatron_zpp {__version__}\n"
    assert versions()["megatron_zpp"] == __version__
    assert citation()["version"] == __version__
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"{newest}." in f"{__version__}."


def test_the_citation_names_the_papers() -> None:
    found = citation()
    assert (found["cff-version"], found["title"], found["license"]) == ("1.2.0", "megatron_zpp", "Apache-2.0")
    assert found["message"] and found["authors"] == [{"name": "The megatron_zpp authors"}]
    titles = {reference["url"].rsplit("/", 1)[1]: reference["title"] for reference in found["references"]}
    assert titles.keys() == PAPERS.keys() and all(titles[number].startswith(title) for number, title in PAPERS.items())
    assert all(author.keys() == {"given-names", "family-names"} for reference in found["references"] for author in reference["authors"])


def test_a_wheel_holds_package_entry_tools_and_kernels_and_nothing_else(tmp_path: Path) -> None:
    names = wheel(tmp_path).namelist()
    assert {name.split("/")[0] for name in names} == {
        "megatron_zpp",
        "megatron_zpp_tools",
        "pretrain_zeropp_gpt.py",
        f"megatron_zpp-{__version__}.dist-info",
    }
    assert {name.removeprefix("megatron_zpp_") for name in names if name.startswith("megatron_zpp_tools/")} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "tools").rglob("*.py")
    }
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron_zpp").rglob("*.py")}
    assert package == {name for name in names if name.startswith("megatron_zpp/") and name.endswith(".py")}
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "megatron_zpp/py.typed" in names


@pytest.mark.parametrize("tool", ["launch", "plan_run", "preprocess_data", "watch_run"])
def test_a_tool_of_a_wheel_finds_package_and_helpers_beside_packages_of_the_same_names(tmp_path: Path, tool: str) -> None:
    wheel(tmp_path).extractall(tmp_path / "installed")
    for helpers in (path for path in (ROOT / "tools").iterdir() if (path / "__init__.py").exists()):
        (tmp_path / "installed" / helpers.name).mkdir()
        (tmp_path / "installed" / helpers.name / "__init__.py").touch()
    words = [sys.executable, str(tmp_path / "installed" / "megatron_zpp_tools" / f"{tool}.py"), "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {tool}.py"), done.stderr


def test_kernels_of_a_checkout_are_those_of_a_wheel(tmp_path: Path) -> None:
    assert SOURCES == ROOT / "csrc"
    wheel(tmp_path).extractall(tmp_path / "installed")
    installed = tmp_path / "installed" / INSTALLED_SOURCES.relative_to(ROOT)
    for architectures in ((), ("9.0",)):
        assert Build(sources=installed, cuda_architectures=architectures).key() == Build(cuda_architectures=architectures).key()
    assert Build(sources=installed, cuda_architectures=("9.0",)).nvcc_flags() == Build(cuda_architectures=("9.0",)).nvcc_flags()


def test_a_program_that_imports_from_an_installed_wheel_sees_its_types(tmp_path: Path) -> None:
    """Without those of torch, which take mypy half a minute."""
    venv.create(tmp_path / "env", with_pip=False)
    packages = next((tmp_path / "env" / "lib").glob("*/site-packages"))
    wheel(tmp_path).extractall(packages)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-torch.*,safetensors.*,numpy.*]\nignore_missing_imports = true\n")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", tmp_path / "env" / "bin" / "python", "--no-color-output", "program.py"]
    printed = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert re.findall(r"program\.py:(\d+): \w+: (.*)", printed) == [
        ("5", 'Revealed type is "megatron_zpp.zero.engine.ZeroEngine"'),
        ("6", 'Revealed type is "megatron_zpp.zero.optimizer_step.StepResult"'),
        ("7", 'Revealed type is "megatron_zpp.checkpoint.sharded_module.Restored"'),
        ("8", 'Revealed type is "megatron_zpp.checkpoint.sharded_module.Restored | None"'),
        ("9", 'Argument 2 to "save" has incompatible type "int"; expected "str | PathLike[str]"  [arg-type]'),
        ("10", 'Module "megatron_zpp" has no attribute "shards"; maybe "shard"?  [attr-defined]'),
    ], printed


PROGRAM = f"""from torch import nn
from megatron_zpp import {", ".join(__all__)}

engine = shard(nn.Linear(2, 2), [""], EngineOptions(policy=ZEROPP))
reveal_type(engine)
reveal_type(engine.step(learning_rate=1e-3))
reveal_type(load(engine, "folder"))
reveal_type(load(engine, "folder", missing_ok=True))
save(engine, 3)
from megatron_zpp import shards
"""


def citation() -> dict[str, object]:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def wheel(folder: Path) -> zipfile.ZipFile:
    """A wheel of the repository, built from a copy of the files that it needs, where an older build has left a module and a kernel."""
    copy = folder / "copy"
    copy.mkdir()
    for name in IN_WHEEL:
        shutil.copy(ROOT / name, copy)
    for name in ("megatron_zpp", "tools", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    (copy / "tests" / "__init__.py").write_text("")
    for left in ("megatron_zpp/gone.py", "megatron_zpp/csrc/gone.cpp"):
        (copy / "build" / "lib" / left).parent.mkdir(parents=True, exist_ok=True)
        (copy / "build" / "lib" / left).write_text("")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=copy, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))
