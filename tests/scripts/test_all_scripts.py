"""Every script of scripts/ is run by some test. Here are those that no other test runs, with a Python that records its calls."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from harness.fake_commands import ROOT, FakeCommands
from torch.distributed.run import parse_args

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve

SCRIPTS = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.suffix in (".sh", ".sbatch"))
MODELS = sorted((ROOT / "scripts" / "models").glob("*.sh"))
TESTED_IN = {
    "checks.sh": "scripts/test_torchrun_scripts.py",
    "cluster_environment.sh": "scripts/test_torchrun_scripts.py",
    "build_extensions.sh": "scripts/test_all_scripts.py",
    "compile_cuda.sh": "scripts/test_all_scripts.py",
    "docs.sh": "scripts/test_all_scripts.py",
    "environment.sh": "scripts/test_all_scripts.py",
    "quickstart.sh": "scripts/test_all_scripts.py",
    "slurm_merge.sbatch": "scripts/test_slurm_scripts.py",
    "slurm_preprocess.sbatch": "scripts/test_slurm_scripts.py",
    "slurm_preprocess.sh": "scripts/test_slurm_scripts.py",
    "slurm_run.sh": "scripts/test_slurm_scripts.py",
    "slurm_srun.sbatch": "scripts/test_slurm_scripts.py",
    "slurm_torchrun.sbatch": "scripts/test_slurm_scripts.py",
    "slurm_torchrun_node.sh": "scripts/test_slurm_scripts.py",
    "ticker.sh": "scripts/test_all_scripts.py",
    "test.sh": "scripts/test_all_scripts.py",
    "torchrun_nodes.sh": "scripts/test_torchrun_scripts.py",
    "torchrun_one_node.sh": "scripts/test_torchrun_scripts.py",
    "zeropp_18b.sh": "integration/test_tutorial.py",
}
# A machine with 4 GPUs, where every program succeeds; a run prints a line and leaves its log.
PYTHON = """
if words[0] == "-c" and "device_count" in words[1]: print(4)
if "--log-jsonl" in words and "pretrain_zeropp_gpt.py" in words:
    open(words[words.index("--log-jsonl") + 1], "w").write("{}")
    print(" iteration       12/      12 | consumed samples: 1 | lm loss: 6.1E+00 | loss scale: 1.0 |")
"""


def test_every_script_is_named_with_the_test_that_runs_it() -> None:
    assert set(SCRIPTS) == set(TESTED_IN)
    assert all((ROOT / "tests" / name).is_file() for name in TESTED_IN.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_reads_the_script_and_it_stops_at_errors(script: str) -> None:
    assert subprocess.run(["bash", "-n", f"scripts/{script}"], cwd=ROOT, check=False).returncode == 0
    text = (ROOT / "scripts" / script).read_text()
    assert text.startswith("# Sourced by") or (text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text)


@pytest.fixture
def copied(tmp_path: Path) -> tuple[FakeCommands, Path]:
    """Fake programs, and a folder with the scripts and the files that they name, so that nothing is written to the repository."""
    folder = tmp_path / "repository"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    fakes = FakeCommands(tmp_path)
    for name in ("python", "python3", "lint-imports", "shellcheck"):
        fakes.add(name, PYTHON)
    return fakes, folder


def test_the_quickstarts_runs_have_flags_that_parse(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    done = fakes.run("bash", "scripts/quickstart.sh", "--no-venv", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [call.words[2:] for call in fakes.calls("python") if call.words[:2] == ["-m", "torch.distributed.run"]]
    assert len(runs) == 5  # trained, resumed, compared three times
    for words in runs:
        place = parse_args(words)
        assert (place.standalone, place.nproc_per_node) == (True, "4")
        config = resolve(parse_flags(place.training_script_args), 4, 4)
        assert config.zero.zero_stage == 3 and config.distributed.ranks_per_node == 2
    tools = {call.words[0] for call in fakes.calls("python") if call.words[0].startswith("tools/")}
    assert tools and all((ROOT / tool).is_file() for tool in tools)


def test_the_quickstart_shows_the_losses_of_compared_runs_and_ends_with_commands_that_parse(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    done = fakes.run("bash", "scripts/quickstart.sh", "--no-venv", folder=folder)
    for name in ("ZeRO-3", "ZeRO++", "lean"):
        assert f"\n{name}: iteration 12 of 12, loss 6.1E+00\n" in done.stdout
    shown = [call.words[1:] for call in fakes.calls("python") if call.words[0] == "tools/watch_run.py"]
    assert [words[0] for words in shown] == ["--once", "--once"]
    words = done.stdout.partition("  torchrun ")[2].replace("\\\n", " ").split()
    place = parse_args(words)
    assert resolve(parse_flags(place.training_script_args), int(place.nproc_per_node), 4).zero.zeropp == "lean"


def test_the_quickstart_stops_at_a_compared_run_that_fails_and_shows_its_last_lines(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    fakes.add("python", PYTHON + '\nif "lean" in words and "pretrain_zeropp_gpt.py" in words: print("no memory"); sys.exit(3)')
    done = fakes.run("bash", "scripts/quickstart.sh", "--no-venv", folder=folder)
    assert done.returncode != 0 and "no memory" in done.stderr and "compared_lean.txt has all it said" in done.stderr
    assert not (folder / "runs" / "quickstart" / "compared_lean.jsonl").exists()


def test_the_quickstart_runs_no_command_that_a_checkpoint_folder_holds(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    latest = folder / "runs" / "quickstart" / "checkpoints" / "latest_checkpointed_iteration.txt"
    latest.parent.mkdir(parents=True)
    latest.write_text("a[$(touch planted)]")
    done = fakes.run("bash", "scripts/quickstart.sh", "--no-venv", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.rglob("planted"))


@pytest.mark.parametrize(("columns", "shown"), [(200, 75), (75, 74), (40, 39), (0, 75)])
def test_the_ticker_stays_on_one_line_of_the_terminal(columns: int, shown: int) -> None:
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = ["bash", "-c", "set -euo pipefail; source scripts/ticker.sh; show_tick 1234"]
    subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=terminal, env={"PATH": os.environ["PATH"], "TERM": "xterm"}, check=True
    )
    os.close(terminal)
    assert os.read(controller, 999).decode() == f"{'... 1234 s':>{shown}}\r"
    os.close(controller)


def test_away_from_a_terminal_a_tick_is_a_line() -> None:
    command = ["bash", "-c", "set -euo pipefail; source scripts/ticker.sh; show_tick 5"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr == "  ... 5 s\n"


def test_the_test_script_runs_every_check_and_passes_arguments_on(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    done = fakes.run("bash", "scripts/test.sh", "--no-venv", "--long", "--tier", "pure", "tests/zero", folder=folder)
    assert done.returncode == 0, done.stderr
    modules = [call.words[1] for call in fakes.calls("python") if call.words[0] == "-m"]
    assert modules[:2] == ["ruff", "ruff"] and modules[-1] == "pytest"
    assert set(modules[2:-1]) == {"mypy", "megatron_zpp.ops.extension"}  # at the same time
    own = ["--hypothesis-profile", "long", "-m", "pure and (long or not long)"]
    assert fakes.calls("python")[-1].words == ["-m", "pytest", *own, "tests/zero"]
    assert fakes.calls("lint-imports") and fakes.calls("shellcheck")


def test_the_test_script_runs_everything_but_long_tests_on_three_workers(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    assert fakes.run("bash", "scripts/test.sh", "--no-venv", folder=folder).returncode == 0
    own = ["-m", "not long", "-n", "3", "--dist", "loadgroup", "--no-loadscope-reorder"]
    assert fakes.calls("python")[-1].words == ["-m", "pytest", *own]


@pytest.mark.parametrize("module", ["mypy", "megatron_zpp.ops.extension"])
def test_the_test_script_ends_where_types_or_kernels_fail(copied: tuple[FakeCommands, Path], module: str) -> None:
    fakes, folder = copied
    fakes.add("python", f"sys.exit(words[1] == {module!r})")
    assert fakes.run("bash", "scripts/test.sh", "--no-venv", folder=folder).returncode != 0
    assert "pytest" not in [call.words[1] for call in fakes.calls("python")]


def test_the_test_script_ends_the_check_of_types_if_kernels_fail(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    checked = folder / "checked"
    fakes.add(
        "python",
        f"""
import time
if words[1] == "mypy":
    time.sleep(5)
    open({str(checked)!r}, "w").close()
sys.exit(words[1] == "megatron_zpp.ops.extension")""",
    )
    assert fakes.run("bash", "scripts/test.sh", "--no-venv", folder=folder).returncode == 1
    assert not checked.exists()


def test_the_test_script_refuses_a_tier_that_there_is_not(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    done = fakes.run("bash", "scripts/test.sh", "--no-venv", "--tier", "slow", folder=folder)
    assert done.returncode != 0 and "--tier slow is not a tier; choose pure, virtual or gloo" in done.stderr


def test_the_site_is_built_anew_and_a_warning_is_an_error(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    (folder / "site").mkdir()
    (folder / "site" / "gone.html").touch()
    done = fakes.run("bash", "scripts/docs.sh", "--no-venv", folder=folder)
    assert done.returncode == 0 and "open site/index.html" in done.stdout, done.stderr
    pages, site = [call.words for call in fakes.calls("python")][-2:]
    assert pages == ["-m", "docs.api_pages"]
    assert site[:2] == ["-m", "sphinx"] and {"-E", "-W", "--nitpicky"} <= set(site)
    assert not list(folder.glob("site/*.html"))


def test_the_site_is_served_on_this_machine_only(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    assert fakes.run("bash", "scripts/docs.sh", "--no-venv", "--serve", folder=folder).returncode == 0
    assert fakes.calls("python")[-1].words == ["-m", "http.server", "--bind", "localhost", "--directory", "site", "8000"]


def test_a_port_that_is_taken_is_named(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    fakes.add("python", 'if "http.server" in words: sys.exit(1)')
    done = fakes.run("bash", "scripts/docs.sh", "--no-venv", "--serve", folder=folder, PORT="8080")
    assert done.returncode != 0 and "PORT=8080 cannot be served; choose another port." in done.stderr


@pytest.mark.parametrize("port", ["http", "0", "65536"])
def test_a_port_that_there_is_not_is_refused_before_the_site_is_built(copied: tuple[FakeCommands, Path], port: str) -> None:
    fakes, folder = copied
    done = fakes.run("bash", "scripts/docs.sh", "--no-venv", "--serve", folder=folder, PORT=port)
    assert done.returncode != 0 and f"PORT={port} is not a whole number from 1 to 65535; correct it." in done.stderr
    assert not fakes.calls("python")


def test_the_kernels_are_built_by_the_active_python(copied: tuple[FakeCommands, Path]) -> None:
    fakes, folder = copied
    assert fakes.run("bash", "scripts/build_extensions.sh", "--no-venv", "--portable", folder=folder).returncode == 0
    assert fakes.calls("python")[-1].words == ["-m", "megatron_zpp.ops.extension", "--portable"]


@pytest.fixture
def bare(tmp_path: Path) -> tuple[FakeCommands, Path]:
    """A copy of the scripts, on a machine whose Python is called python3 alone and does what `add` says."""
    shutil.copytree(ROOT / "scripts", tmp_path / "copy" / "scripts")
    fakes = FakeCommands(tmp_path)
    for name in ("bash", "dirname"):
        (fakes.folder / name).symlink_to(shutil.which(name) or name)
    return fakes, tmp_path / "copy"


def test_in_the_active_environment_a_build_asks_for_torch_and_setuptools_alone_and_for_no_index(bare: tuple[FakeCommands, Path]) -> None:
    fakes, folder = bare
    fakes.add("python3")
    done = fakes.run("bash", "scripts/build_extensions.sh", "--no-venv", folder=folder, PATH=str(fakes.folder))
    words = [call.words for call in fakes.calls("python3")]
    assert done.returncode == 0, done.stderr
    assert words[-1] == ["-m", "megatron_zpp.ops.extension"] and not any("pip" in word for call in words for word in call)
    asked = [word for call in words for word in call if "import setuptools, torch" in word]
    assert len(asked) == 1 and not any("requirements.txt" in call for call in words)


def test_a_build_in_an_environment_that_lacks_torch_says_what_to_do(bare: tuple[FakeCommands, Path]) -> None:
    fakes, folder = bare
    fakes.add("python3", 'sys.exit("torch" in words[-1])')
    done = fakes.run("bash", "scripts/build_extensions.sh", "--no-venv", folder=folder, PATH=str(fakes.folder))
    assert done.returncode == 2 and "lacks torch 2.6 or newer, or setuptools; install them, or leave --no-venv out." in done.stderr


def test_without_nvcc_no_cuda_source_is_compiled_and_that_is_said(tmp_path: Path) -> None:
    done = FakeCommands(tmp_path).run("bash", "scripts/compile_cuda.sh")
    assert done.returncode == 0 and "nvcc is not found" in done.stdout


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_flags_of_a_published_shape_parse(path: Path) -> None:
    listed = subprocess.run(
        ["bash", "-c", f'set -eu; source "{path}"; printf "%s\\0" "${{MODEL_ARGS[@]}}"'], capture_output=True, check=True
    )
    words = listed.stdout.decode().split("\0")[:-1]
    config = parse_flags(words)
    ranks = config.distributed.tensor_model_parallel_size
    resolve(config, ranks, ranks)
