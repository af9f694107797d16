"""Everything that the documents name exists: files, flags, functions. tests/docs/test_site.py looks at links."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from functools import cache

import pytest
from harness import forked
from harness.places import ROOT

from megatron_zpp.config.cli import help_text
from megatron_zpp.config.obsolete import accepted_flag, remedy_of_refused

PACKAGE = ROOT / "megatron_zpp"
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "flags.md")]
ENTRY = "pretrain_zeropp_gpt.py"
PROGRAM = re.compile(r"^(?:tools|scripts|benchmarks|examples)/\w+\.(?:py|sh|sbatch)$|^pretrain_zeropp_gpt\.py$")
# The program to which each script passes its arguments.
PASSED_ON = {
    "scripts/slurm_preprocess.sh": "tools/preprocess_data.py",
    "scripts/slurm_srun.sbatch": ENTRY,
    "scripts/slurm_torchrun.sbatch": ENTRY,
    "scripts/torchrun_nodes.sh": ENTRY,
    "scripts/torchrun_one_node.sh": ENTRY,
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
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
FUNCTION = re.compile(r"`?((?:\w+/)?\w+\.py):(\w+)`?")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def commands(document: str) -> list[list[str]]:
    """The words of every command in the document's bash blocks. Arrays of words are put in; comments and `source` are left out."""
    text = "\n".join(re.findall(r"^```bash\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL))
    for whole, name, words in re.findall(r"^((\w+)=\((.*?)\)\n)", text, re.MULTILINE | re.DOTALL):
        text = text.replace(whole, "").replace(f'"${{{name}[@]}}"', words.replace("\n", " "))
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True)) and words[0] != "source"]


@cache
def flags_of(program: str) -> frozenset[str]:
    """The flags that a program of this repository prints in its help."""
    program = PASSED_ON.get(program, program)
    if program.startswith("examples/"):
        return frozenset()  # they take none
    if program == ENTRY:
        return frozenset(FLAG.findall(help_text()))
    if program.endswith(".sh"):
        done = subprocess.run(["bash", program, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    else:
        done = forked.run(program, "--help")
    assert done.returncode == 0, done.stderr
    return frozenset(FLAG.findall(done.stdout))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_run_programs_that_exist_with_flags_that_they_know(document: str) -> None:
    for words in commands(document):
        places = [place for place, word in enumerate(words) if PROGRAM.match(word)]
        if [words[place] for place in places] == ["tools/launch.py", ENTRY]:
            words[places.pop()] = "--"
        assert len(places) == 1, words
        program, arguments = words[places[0]], words[places[0] + 1 :]
        assert (ROOT / program).is_file()
        end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows goes to the training script
        own, passed_on = ({word for word in part if word.startswith("--")} for part in (arguments[:end], arguments[end + 1 :]))
        unknown = (own - flags_of(program)) | (passed_on - flags_of(ENTRY))
        assert not unknown, (program, unknown)


def test_flags_in_the_text_of_the_documents_exist() -> None:
    programs = {word for document in DOCUMENTS for words in commands(document) for word in words if PROGRAM.match(word)}
    known = OF_LAUNCHERS.union({"--help"}, *map(flags_of, programs))
    for document in DOCUMENTS:
        quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text_of(document), flags=re.MULTILINE | re.DOTALL))
        unknown = {flag for words in quoted for flag in FLAG.findall(words)} - known
        if document in OF_MISSING_THINGS:
            unknown = {flag for flag in unknown if accepted_flag(flag) is None and remedy_of_refused(flag) is None}
        assert not unknown, document


@pytest.mark.parametrize("document", DOCUMENTS)
def test_functions_that_are_named_with_their_file_are_defined_there(document: str) -> None:
    for file, name in FUNCTION.findall(text_of(document)):
        path = PACKAGE / file if "/" in file else ROOT / file
        defined = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert name in defined, f"{file}:{name}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_of_tests_and_documents_exist(document: str) -> None:
    for path in re.findall(r"`((?:tests|docs|scripts|tools|benchmarks|megatron_zpp)/[\w./]*)`", text_of(document)):
        assert (ROOT / path).exists(), path


def test_every_room_of_the_package_is_on_a_floor_of_the_house() -> None:
    floors = text_of("docs/house.md").split("```")[1]
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set(floors.split())
