"""Commands of clusters that write down how they were called, first on PATH, for scripts under test."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.patience import PATIENCE_SECONDS
from harness.places import ROOT

REAL = "/usr/bin:/bin"
# Imports what is there already: fakes are started by the hundred, and json and subprocess take as long as all else of them.
HEAD = """#!{python} -SE
import os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(repr([name, words, dict(os.environ), os.getcwd()]) + "\\n")
"""
# Starts its command once per task, as SLURM_NTASKS says, with the variables that the tasks of a step have.
SRUN = """
while words[0].startswith("--"):
    del words[: 1 if "=" in words[0] else 2]
tasks, per_node = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
codes = []
for task in range(tasks):
    place = {"SLURM_PROCID": task, "SLURM_LOCALID": task % per_node, "SLURM_NODEID": task // per_node, "SLURM_STEP_ID": 0}
    environment = os.environ | {name: str(value) for name, value in place.items()} | {"SLURM_STEP_NODELIST": "node[3-4]"}
    codes.append(os.spawnvpe(os.P_WAIT, words[0], words, environment))
sys.exit(max(codes))
"""
SCONTROL = 'if words[:2] == ["show", "hostnames"]: print("node3\\nnode4")'
# sbatch runs a job at once, in a copy of the script as Slurm does, and an array as often as it has tasks.
SBATCH = """
import subprocess
options = words[: next(i for i, word in enumerate(words) if word.endswith(".sbatch"))]
script, *arguments = words[len(options):]
copy = {log!r} + ".script"
open(copy, "w").write(open(script).read())
environment = os.environ | dict(SLURM_SUBMIT_DIR=os.getcwd(), SLURM_JOB_ID="70", SLURM_CPUS_PER_TASK="1")
first, last = options[options.index("--array") + 1].split("-") if "--array" in options else (0, 0)
for task in reversed(range(int(first), int(last) + 1)):
    place = dict(SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_TASK_COUNT=str(int(last) + 1))
    subprocess.run(["bash", copy, *arguments], env=environment | place, check=True, stdout=sys.stderr)
print("70;cluster" if "--parsable" in options else "Submitted batch job 71")
"""


@dataclass(frozen=True)
class Call:
    """One call of a command: its words without the name, its environment and working directory."""

    words: list[str]
    environment: dict[str, str]
    folder: str


class FakeCommands:
    """A folder of fake commands, and what was done with them."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "calls.txt"
        self.folder = folder / "bin"
        self.folder.mkdir()

    def add(self, name: str, body: str = "") -> None:
        """A command that notes its call and then runs `body` (Python), to which its words are known as `words`."""
        path = self.folder / name
        path.write_text(HEAD.format(python=sys.executable, log=str(self.log)) + body.replace("{log!r}", repr(str(self.log))))
        path.chmod(0o755)

    def add_python(self) -> None:
        """The Python that runs the tests, as `python`. It notes nothing."""
        path = self.folder / "python"
        path.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n')
        path.chmod(0o755)

    def run(self, *words: str | Path, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
        """The command with fakes first on PATH, and no variables but HOME and these."""
        environment = {"PATH": f"{self.folder}:{REAL}", "HOME": os.environ.get("HOME", "/"), **variables}
        return subprocess.run(
            [str(word) for word in words], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )

    def calls(self, name: str) -> list[Call]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [Call(*rest) for called, *rest in map(ast.literal_eval, lines) if called == name]
