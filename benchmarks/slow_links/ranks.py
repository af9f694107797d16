"""Starts the ranks as processes that answer their parent's questions and end with it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import ROOT

WORKER = "benchmarks.slow_links.worker"
PORT = 29500
LAST_WORDS_BYTES = 2000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
Answer = dict[str, Any]


class RankFailed(RuntimeError):
    """Raised if a rank fails or does not answer; the text has the end of its output."""


class Ranks:
    """A world of worker processes, with two pipes to each.

    inside: for every node, the words that start a command there. address: of rank 0.
    """

    def __init__(self, inside: Sequence[Sequence[str]], ranks_per_node: int, address: str, environment: Mapping[str, str]) -> None:
        world_size = len(inside) * ranks_per_node
        common = {
            **os.environ,
            "MASTER_ADDR": address,
            "PYTHONPATH": str(ROOT),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            **environment,
        }
        self.ranks_per_node = ranks_per_node
        self.processes: list[subprocess.Popen[str]] = []
        self._logs = [tempfile.TemporaryFile("w+b") for _ in range(world_size)]  # without a name, so there is nothing to remove
        for rank in range(world_size):
            node, local_rank = divmod(rank, ranks_per_node)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            process = subprocess.Popen(
                [*inside[node], sys.executable, "-m", WORKER],
                env={**common, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._logs[rank],
                text=True,
                start_new_session=True,  # Ctrl-C must reach only the parent, which then ends its ranks
                preexec_fn=_die_with_parent,
            )
            self.processes.append(process)

    def start(self, timeout_seconds: float) -> Answer:
        """Joins the process group and returns rank 0's description of itself. timeout_seconds: of every later collective."""
        return self.ask_all(timeout_seconds, timeout_seconds=timeout_seconds)[0]

    def ask_all(self, seconds: float, **question: Any) -> list[Answer]:
        """The answers of all ranks to one question, in rank order. Raises RankFailed, also if one takes longer than `seconds`."""
        return self.ask(dict.fromkeys(range(len(self.processes)), question), seconds)

    def ask(self, questions: Mapping[int, Mapping[str, Any]], seconds: float) -> list[Answer]:
        """The answers of the ranks in `questions`, in the same order. Raises RankFailed, also if one takes longer than `seconds`."""
        for rank, question in questions.items():
            stdin = self.processes[rank].stdin
            if stdin is None:
                raise RuntimeError(f"rank {rank} has no standard input")
            try:
                stdin.write(json.dumps(question) + "\n")
                stdin.flush()
            except BrokenPipeError:
                raise RankFailed(self._what_was_said([rank])) from None
        return self._collect(list(questions), seconds)

    def _collect(self, asked: Sequence[int], seconds: float) -> list[Answer]:
        deadline = time.monotonic() + seconds
        answers: dict[int, Answer] = {}
        with selectors.DefaultSelector() as selector:
            for rank in asked:
                selector.register(self.processes[rank].stdout, selectors.EVENT_READ, rank)  # type: ignore[arg-type]
            while len(answers) < len(asked):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = [rank for rank in asked if rank not in answers]
                    raise RankFailed(f"no answer within {seconds:.0f} s:\n{self._what_was_said(silent)}")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise RankFailed(self._what_was_said([key.data]))
                    answers[key.data] = json.loads(line)
                    if "error" in answers[key.data]:
                        raise RankFailed(f"rank {key.data}: {answers[key.data]['error']}")
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in asked]

    def end(self) -> None:
        """Lets every rank end by itself."""
        self.ask_all(60, ask="end")

    def kill(self) -> None:
        """Kills every process that is left, and waits for it."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        for log in self._logs:
            log.close()

    def _last_words(self, rank: int) -> str:
        log = self._logs[rank].fileno()
        size = os.fstat(log).st_size
        start = max(0, size - LAST_WORDS_BYTES)
        return os.pread(log, size - start, start).decode(errors="replace")  # seek would move the writer too

    def _what_was_said(self, ranks: Sequence[int]) -> str:
        time.sleep(0.2)  # exit codes and last output may take a moment
        return "\n".join(f"[rank {rank}, exit code {self.processes[rank].poll()}] {self._last_words(rank)}" for rank in ranks)


def _die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, even if the parent is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
