"""Standard output that is gone does not end a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from harness.places import ROOT

PROGRAM = """
import os, sys
from megatron_zpp.system.lasting_stream import tell_lost_lines, use_lasting_streams
use_lasting_streams()
for line in range(3):
    print(line, flush=True)
tell_lost_lines()
print("an error", file=sys.stderr, flush=True)
os.system("echo child")
os._exit(0)
"""


def run(stdout: int | IO[str], stderr: int | IO[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=stdout, stderr=stderr, text=True, check=False)


def pipe_without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_without_a_reader_the_program_goes_on_and_says_so_twice() -> None:
    done = run(pipe_without_reader(), subprocess.PIPE)
    first, last, error = done.stderr.splitlines()
    assert done.returncode == 0 and error == "an error"
    assert first == "WARNING: standard output failed ([Errno 32] Broken pipe); the run goes on, and some of its lines are lost."
    assert last == "WARNING: standard output is incomplete, because it failed ([Errno 32] Broken pipe)."


def test_both_streams_may_be_gone() -> None:
    writer = pipe_without_reader()
    assert run(writer, writer).returncode == 0


def test_a_full_disk_costs_lines_and_not_the_program() -> None:
    with open("/dev/full", "w") as full:
        done = run(full, subprocess.PIPE)
    assert done.returncode == 0 and done.stderr.count("No space left on device") == 2


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_are_closed_at_the_start_are_none(closed: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = f'PYTHONPATH="{ROOT}" exec "{sys.executable}" "{program}" {closed}'
    assert subprocess.run(["bash", "-c", command], capture_output=True, check=False).returncode == 0


def test_streams_that_work_are_unchanged() -> None:
    done = run(subprocess.PIPE, subprocess.PIPE)
    assert done.stdout == "0\n1\n2\nchild\n" and done.stderr == "an error\n"


def test_a_character_that_the_encoding_lacks_is_printed_as_an_escape() -> None:
    program = PROGRAM.replace("print(line", r'print("\xe9\udcf6"')
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\xe9\\udcf6\n" * 3 + "child\n", "an error\n")
