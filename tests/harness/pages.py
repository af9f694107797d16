"""The pages of the documentation, and their commands as bash reads them."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.places import ROOT

WRITTEN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
PAGES = (*WRITTEN, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "flags.md"))
# Programs whose first lines or help say how to call them.
PROGRAMS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("tools", "benchmarks", "scripts", "examples")
    for path in (ROOT / folder).iterdir()
    if path.suffix in (".py", ".sh", ".sbatch")
)
SHELL = ("bash", "console", "sh")  # languages of blocks with commands
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STARTS = r"(?:[A-Z_]+=\S+ )*(?:python|bash|torchrun|srun|sbatch|mpirun|nohup|pip|deepspeed|source|megatron-zpp) "
LINE = rf"{STARTS}(?:[^\n]*\\\n)*[^\n]*\n"  # with its continuations
PLACES = re.compile(rf"{FENCED.pattern}|`({STARTS}[^`]+)`|^    ({LINE})", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"(benchmarks|docs|examples)\.(\w+)")  # a program, after -m
NO_PROGRAMS = "/nonexistent"
# Every command that is not built into bash is noted and not started: what it has exported, and its words. Shapes are read, because a
# command may use their arrays. Output that a command sends to a file goes to a folder of its own.
NOTES = """
set -euf
exec 3>&1
note() {
    local name names=()
    for name in $(compgen -e); do
        case $name in PATH | PWD | OLDPWD | SHLVL | _) ;; *) names+=("$name=${!name}") ;; esac
    done
    printf '%s\\0' "$PAGE" "${#names[@]}" ${names[@]+"${names[@]}"} "$#" "$@" >&3
}
command_not_found_handle() { note "$@"; }
source() { note source "$@"; case $1 in scripts/models/*) builtin source "$ROOT/$1" ;; esac }
"""


@dataclass(frozen=True)
class Command:
    """A command of a page: its words as a program gets them, and the variables before it."""

    page: str
    words: tuple[str, ...]
    variables: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join((*self.variables, *self.words))

    @property
    def words_with_files(self) -> tuple[str, ...]:
        """Its words, each of this repository's programs as its file: benchmarks/NAME.py for -m benchmarks.NAME."""
        words: list[str] = []
        for word in self.words:
            if words[-1:] == ["-m"] and (module := MODULE.fullmatch(word)):
                words[-1] = f"{module[1]}/{module[2]}.py"
            else:
                words.append(word)
        return tuple(words)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def without_blocks(page: str) -> str:
    """The text of a page without its fenced blocks."""
    return FENCED.sub("", text_of(page))


@cache
def commands() -> tuple[Command, ...]:
    """Every command of the pages, in order, and those at the beginning and in the help of programs."""
    scripts = {page: _script_of_page(page) for page in PAGES} | {program: _script_of_program(program) for program in PROGRAMS}
    scripts = {page: script for page, script in scripts.items() if script}
    whole = NOTES + "".join(f"(PAGE={page}\n{script}\nwait) || exit 1\n" for page, script in scripts.items())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "docs").mkdir()
        bash = ["/bin/bash", "-c", f"ROOT={shlex.quote(str(ROOT))}\n{whole}"]
        done = subprocess.run(bash, cwd=folder, env={"PATH": NO_PROGRAMS}, capture_output=True, text=True, check=False)
    if done.returncode or done.stderr:
        raise ValueError(f"bash does not read the commands of a page: {done.stderr}")
    fields = iter(done.stdout.split("\0")[:-1])
    return tuple(_noted(page, fields) for page in fields)


def command_of(page: str, beginning: str) -> Command:
    """The one command of the page that begins so. Raises ValueError if there are none or several."""
    found = {command.text: command for command in commands() if command.page == page and command.text.startswith(beginning)}
    if len(found) != 1:
        raise ValueError(f"{page} has {len(found)} commands that begin with {beginning!r}")
    return found.popitem()[1]


def _noted(page: str, fields: Iterator[str]) -> Command:
    variables = tuple(next(fields) for _ in range(int(next(fields))))
    return Command(page, tuple(next(fields) for _ in range(int(next(fields)))), variables)


def _script_of_page(page: str) -> str:
    """The commands of a page in their order: those of its blocks, of indented lines, and within sentences."""
    parts = []
    for language, block, within, indented in PLACES.findall(text_of(page)):
        if language in SHELL or within or indented:
            parts.append(block or within.replace("\n", " ") or indented)
    return "\n".join(parts)


def _script_of_program(program: str) -> str:
    """The commands that a program shows: in its first docstring, or in comments and help of a script."""
    text = text_of(program)
    if program.endswith(".py"):
        shown = ast.get_docstring(ast.parse(text)) or ""
    else:
        shown = "\n".join(
            [*re.findall(r"^#  ? ?(.*)$", text, re.MULTILINE), *re.findall(r"<<'TEXT'\n(.*?)^TEXT$", text, re.DOTALL | re.MULTILINE)]
        )
    return "".join(
        words
        for words in re.findall(rf"^ *({LINE})", shown + "\n", re.MULTILINE)
        if re.search(rf"\w+\.(?:py|sh|sbatch)\b|-m {MODULE.pattern}", words)
    )
