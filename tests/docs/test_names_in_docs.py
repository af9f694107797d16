"""Everything that the documents name exists: files, flags, functions, classes, variables. tests/docs/test_site.py looks at links."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache

import pytest
from harness import forked
from harness.pages import PAGES, Command, commands, text_of, without_blocks
from harness.places import ROOT

from megatron_zpp.config.cli import help_text
from megatron_zpp.config.obsolete import accepted_flag, remedy_of_refused

PACKAGE = ROOT / "megatron_zpp"
ENTRY = "pretrain_zeropp_gpt.py"
PROGRAM = re.compile(r"^(?:tools|scripts|benchmarks|examples)/\w+\.(?:py|sh|sbatch)$|^pretrain_zeropp_gpt\.py$")
# The program to which each script passes its arguments.
PASSED_ON = {
    "benchmarks/gpu_check.sh": "benchmarks/gpu_check.py",
    "benchmarks/gpu_half_hour.sh": "benchmarks/gpu_check.py",
    "scripts/slurm_preprocess.sh": "tools/preprocess_data.py",
    "scripts/slurm_srun.sbatch": ENTRY,
    "scripts/slurm_torchrun.sbatch": ENTRY,
    "scripts/torchrun_nodes.sh": ENTRY,
    "scripts/torchrun_one_node.sh": ENTRY,
    "scripts/zeropp_18b.sh": ENTRY,
}
OF_MISSING_THINGS = ("docs/coming_from_megatron.md", "docs/not_done.md")  # also name flags that are refused
OF_LAUNCHERS = frozenset(  # of sbatch and torchrun
    {
        "--requeue",
        "--signal",
        "--time",
        "--max-restarts",
        "--gpus-per-node",
        "--ntasks-per-node",
        "--cpus-per-task",
        "--nproc_per_node",
        "--no-python",
    }
)
OF_OTHER_PROGRAMS = {"pretrain_gpt.py", "zero_to_fp32.py", "deepspeed_to_transformers.py"}
OF_NCCL_AND_OTHERS = {  # variables that no program here reads or sets
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_IB_DISABLE",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "NCCL_P2P_NET_CHUNKSIZE",
    "TORCH_GLOO_LAZY_INIT",
    "TRITON_CACHE_DIR",
}
SOURCES = (".py", ".sh", ".sbatch", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".toml", ".json")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
FILE = re.compile(r"(?:[\w.]+/)*[\w.-]+\.(?:py|sh|sbatch|cpp|cuh?|hpp|h|toml)\b")
FUNCTION = re.compile(r"`?((?:\w+/)?\w+\.py):(\w+)`?")
VARIABLE = re.compile(r"(?<![\w/-])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")


def quoted(page: str) -> list[str]:
    """What stands as code within the sentences of a page."""
    return re.findall(r"`([^`\n]+)`", without_blocks(page))


@cache
def files() -> frozenset[str]:
    """The files of the repository that git does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return frozenset(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())


@cache
def flags_of(program: str) -> frozenset[str]:
    """The flags that a program of this repository prints in its help."""
    program = PASSED_ON.get(program, program)
    takes_none = program == "scripts/compile_cuda.sh" or (
        program.startswith("examples/") and "argparse" not in (ROOT / program).read_text()
    )
    if takes_none:
        return frozenset()
    if program == ENTRY:
        return frozenset(FLAG.findall(help_text()))
    if program.endswith(".sh"):
        done = subprocess.run(["bash", program, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    else:
        done = forked.run(program, "--help")
    assert done.returncode == 0, done.stderr
    return frozenset(FLAG.findall(done.stdout))


def of_this_repository(command: Command) -> bool:
    return any(PROGRAM.match(word) for word in command.words_with_files)


@pytest.mark.parametrize("page", sorted({command.page for command in commands()}))
def test_commands_run_programs_that_exist_with_flags_that_they_know(page: str) -> None:
    for command in filter(of_this_repository, commands()):
        if command.page != page:
            continue
        words = [word.strip("[]") for word in command.words_with_files]
        places = [place for place, word in enumerate(words) if PROGRAM.match(word)]
        if [words[place] for place in places] == ["tools/launch.py", ENTRY]:
            words[places.pop()] = "--"
        if words[places[0]] == "benchmarks/fake_gpus.py" and len(places) == 2:
            del places[0]  # a command that another runs
        assert len(places) == 1, words
        program, arguments = words[places[0]], words[places[0] + 1 :]
        assert (ROOT / program).is_file()
        end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows goes to the training script
        own, passed_on = ({word for word in part if word.startswith("--")} for part in (arguments[:end], arguments[end + 1 :]))
        unknown = (own - flags_of(program)) | (passed_on - flags_of(ENTRY))
        assert not unknown, (program, unknown)


def test_flags_in_the_text_of_the_documents_exist() -> None:
    programs = {word for command in commands() for word in command.words_with_files if PROGRAM.match(word)}
    known = OF_LAUNCHERS.union({"--help"}, *map(flags_of, programs))
    for page in PAGES:
        unknown = {flag for words in quoted(page) for flag in FLAG.findall(words)} - known
        if page in OF_MISSING_THINGS:
            unknown = {flag for flag in unknown if accepted_flag(flag) is None and remedy_of_refused(flag) is None}
        assert not unknown, page


@pytest.mark.parametrize("page", PAGES)
def test_functions_that_are_named_with_their_file_are_defined_there(page: str) -> None:
    for file, name in FUNCTION.findall(text_of(page)):
        path = PACKAGE / file if "/" in file else ROOT / file
        defined = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert name in defined, f"{file}:{name}"


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders_of_the_repository_exist(page: str) -> None:
    for path in re.findall(r"`((?:tests|docs|scripts|tools|benchmarks|examples|csrc|megatron_zpp)/[\w./]*)`", text_of(page)):
        assert (ROOT / path).exists(), path
    named = {file for words in quoted(page) for file in FILE.findall(words)} - OF_OTHER_PROGRAMS
    assert not [file for file in named if not any(f"/{known}".endswith(f"/{file}") for known in files())]


@cache
def words_of_programs() -> frozenset[str]:
    programs = (text_of(file) for file in files() if file.endswith(SOURCES) and not file.startswith("tests/"))
    return frozenset(word for text in programs for word in re.findall(r"\w+", text))


@pytest.mark.parametrize("page", sorted(set(PAGES) - set(OF_MISSING_THINGS)))
def test_classes_that_are_named_exist(page: str) -> None:
    named = {name for words in quoted(page) for name in re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z0-9]*)+\b", words)}
    assert named <= words_of_programs()


def test_variables_of_the_environment_stand_in_a_program() -> None:
    used = words_of_programs() | OF_NCCL_AND_OTHERS
    assert {page: unknown for page in PAGES if (unknown := set(VARIABLE.findall(text_of(page))) - used)} == {}


def test_every_room_of_the_package_is_on_a_floor_of_the_house() -> None:
    floors = text_of("docs/house.md").split("```")[1]
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set(floors.split())
