"""Programs and ranks as processes of their own that begin with torch imported.

They are forked from a server that has done nothing but import: a process costs milliseconds instead of the seconds that torch takes.
Programs that read the environment while they are imported, or whose start or end is what is tested, need a real start instead.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from harness.places import ROOT, importing

CONTEXT = multiprocessing.get_context("forkserver")


def start_process(target: Callable[..., None], *arguments: object, daemon: bool = False) -> ForkServerProcess:
    """A process that calls `target(*arguments)`."""
    _start_server()
    process = CONTEXT.Process(target=target, args=arguments, daemon=daemon)
    process.start()
    return process


def _start_server() -> None:
    """Starts the server unless it runs."""
    CONTEXT.set_forkserver_preload(["harness.preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ.update(importing(os.environ))  # it does not take over sys.path
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Forked:
    """A Python program that has been started, as `python PROGRAM ARGUMENTS`, or `python -m MODULE ARGUMENTS`."""

    def __init__(self, program: Path | str, *arguments: object, environment: Mapping[str, str] | None = None, folder: Path = ROOT) -> None:
        self.words = [str(program), *map(str, arguments)]
        self._output = Path(tempfile.mkdtemp(prefix="forked"))
        variables = dict(os.environ if environment is None else environment)
        self.process = start_process(_become, self.words, variables, str(folder), self._output)

    def finished(self, timeout_seconds: float = 600) -> subprocess.CompletedProcess[str]:
        """What has become of it, once it has ended. Raises TimeoutError for one that does not end."""
        self.process.join(timeout_seconds)
        if self.process.is_alive():
            self.process.kill()
            raise TimeoutError(f"{self.words} has not ended within {timeout_seconds} s")
        stdout, stderr = (self._output.joinpath(name).read_text() for name in ("stdout", "stderr"))
        shutil.rmtree(self._output)
        return subprocess.CompletedProcess(self.words, self.process.exitcode or 0, stdout, stderr)


def run(program: Path | str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the program from the root of the repository."""
    return Forked(program, *arguments).finished()


def _become(words: list[str], environment: dict[str, str], folder: str, output: Path) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # see interrupts.py; Python has started, so this is what it would have set
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path.insert(0, str(Path.cwd() if is_module else Path(words[0]).resolve().parent))
    code = 1
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
