"""A run that is killed again and again, and what it came to. As a program: one soak, in numbers.

    PYTHONPATH=tests python -m harness.soak --folder /path/to/a/folder --minutes 30

Called again with the same folder it goes on; --minutes 0 only looks at what there is.

Every start of the run is a torchrun of 2, 4 or 6 ranks at some stage of ZeRO, saving in the background or not. It is left alone for a
random time and then loses a rank, dies as a whole, or is asked to leave; now and then while it still starts. Beside what the run itself
writes, its ranks write down every sample that they train on (watched_rank.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.places import importing
from harness.tiny_corpus import write_corpus
from harness.tiny_runs import TINY

GLOBAL_BATCH = 24
STAGES = ("--zero-stage 3 --zero-hpz-partition-size 2", "--zero-stage 3", "--zero-stage 2", "--zero-stage 1", "--zero-stage 0")
WORLDS = (2, 4, 6)
TRAINING = (
    f"--train-iters 1000000 --global-batch-size {GLOBAL_BATCH} --micro-batch-size 2 --ranks-per-node 2 --split 100,0,0 "
    "--lr 1e-3 --lr-warmup-iters 20 --distributed-timeout-minutes 1"
)
SAVING = "--save-interval 10 --keep-last 2 --exit-signal-handler"
SECONDS_TO_LIVE = (0.5, 8.0)
SHARE_KILLED_AT_START = 0.15
SECONDS_TO_START = 120.0
SECONDS_TO_END = 90.0

ONE_RANK, ALL, ASKED, ASKED_LAUNCHER = "SIGKILL to one rank", "SIGKILL to all", "SIGTERM to one rank", "SIGTERM to torchrun"
ENDS = (ONE_RANK, ALL, ASKED, ASKED_LAUNCHER)
ENDS_WITH_A_SAVE = (ASKED, ASKED_LAUNCHER)


@dataclass(frozen=True)
class Start:
    """One start of the run and what is left of it. latest: what `latest_checkpointed_iteration.txt` said before and after."""

    folder: Path
    ranks: int
    flags: str
    end: str
    exit_code: int
    latest_before: int
    latest_after: int

    @property
    def losses(self) -> dict[int, float]:
        """By iteration, as far as rank 0 had come."""
        path = self.folder / "log.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {record["iteration"]: record["lm_loss"] for record in map(json.loads, filter(_is_whole, lines))}

    def samples(self) -> Iterator[tuple[int, int, int]]:
        """Iteration, number and checksum of all samples that any rank has begun to train on."""
        for path in self.folder.glob("rank_*.txt"):
            for line in path.read_text().splitlines():
                iteration, sample, checksum = map(int, line.split())
                yield iteration, sample, checksum


class Soak:
    """A run under `folder`. starts: all that happened to it, in order."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self._seed = seed
        self._history = folder / "starts.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        lines = self._history.read_text().splitlines() if self._history.exists() else []
        self.starts = [Start(folder / name, *values) for name, *values in map(json.loads, lines)]
        self._corpus = folder / "corpus"
        if not lines:
            generator = np.random.default_rng(seed)
            steps = [generator.integers(1, 4, size=generator.integers(20, 200)) for _ in range(400)]
            write_corpus(folder, [(np.cumsum(of_document) % 97).tolist() for of_document in steps])

    @property
    def latest(self) -> int:
        """The iteration that the next start goes on from."""
        path = self.folder / "saved" / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else 0

    def run(self, minutes: float) -> None:
        """Starts the run and ends it, over and over, until the time is up."""
        deadline = time.monotonic() + 60 * minutes
        while time.monotonic() < deadline:
            self._start()
            with self._history.open("a") as history:
                start = self.starts[-1]
                history.write(json.dumps([start.folder.name, *list(vars(start).values())[1:]]) + "\n")

    def unbroken(self) -> Start:
        """The same run up to the same iteration, in one piece."""
        ranks, flags, folder = 2, f"{STAGES[0]} --exit-interval {self.latest}", self.folder / "unbroken"
        shutil.rmtree(folder, ignore_errors=True)
        return Start(folder, ranks, flags, ASKED, self._launch(ranks, flags, folder).wait(), 0, self.latest)

    def _start(self) -> None:
        places = random.Random(f"{self._seed} {len(self.starts)}")
        ranks, end = places.choice(WORLDS), places.choice(ENDS)
        flags = f"{places.choice(STAGES)} {SAVING} --save {self.folder / 'saved'} --load {self.folder / 'saved'}"
        flags += " --async-save" if len(self.starts) % 2 else ""
        folder = self.folder / f"start {len(self.starts):04d}"
        before = self.latest
        launcher = self._launch(ranks, flags, folder)
        if end in ENDS_WITH_A_SAVE or places.random() > SHARE_KILLED_AT_START:
            _wait_for(folder / "log.jsonl", launcher)
        time.sleep(places.uniform(*SECONDS_TO_LIVE))
        _bring_about(end, launcher, folder, places)
        code = launcher.wait(SECONDS_TO_END)
        _end_orphans(folder)
        self.starts.append(Start(folder, ranks, flags, end, code, before, self.latest))

    def _launch(self, ranks: int, flags: str, folder: Path) -> subprocess.Popen[bytes]:
        folder.mkdir()
        launch = f"-m torch.distributed.run --standalone --nproc_per_node {ranks} -m harness.watched_rank"
        arguments = [*TINY, *f"{TRAINING} --data-path {self._corpus} --tokenizer-type NullTokenizer {flags}".split()]
        with (folder / "output.txt").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, *launch.split(), *arguments, "--log-jsonl", str(folder / "log.jsonl")],
                env=importing({**os.environ, "WATCHED": str(folder), "OMP_NUM_THREADS": "1"}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@dataclass(frozen=True)
class Verdict:
    """What a soak came to. worst_difference: of a loss, relative, between the broken and the unbroken run."""

    iterations: int
    starts: int
    by_end: dict[str, int]
    by_ranks: dict[int, int]
    saved_in_background: int
    iterations_done_twice: int
    worst_difference: float


def check(soak: Soak) -> Verdict:
    """Raises AssertionError where anything of the run is not as if it had never been broken, rounding of its losses aside."""
    starts, last, whole = soak.starts, soak.latest, soak.unbroken()
    expected = whole.losses
    assert whole.exit_code == 0 and sorted(expected) == list(range(1, last + 1))
    _check_lineage(starts)
    _check_samples(starts, whole, last)
    differences = [abs(loss - expected[i]) / expected[i] for start in starts for i, loss in start.losses.items() if i <= last]
    done = [i for start in starts for i in start.losses]
    return Verdict(
        iterations=last,
        starts=len(starts),
        by_end=dict(Counter(start.end for start in starts)),
        by_ranks=dict(Counter(start.ranks for start in starts)),
        saved_in_background=sum("--async-save" in start.flags for start in starts),
        iterations_done_twice=len(done) - len(set(done)),
        worst_difference=max(differences),
    )


def _check_lineage(starts: Sequence[Start]) -> None:
    """Every start goes on from the checkpoint that the one before left, whose end was the one that was meant."""
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        seen = sorted(start.losses)
        assert seen == list(range(start.latest_before + 1, start.latest_before + 1 + len(seen))), start
        assert start.latest_after >= start.latest_before, start
        said = [int(line.split()[5]) for line in _output(start) if "successfully saved checkpoint" in line]
        assert max(said, default=start.latest_before) <= start.latest_after, start
        if start.end in ENDS_WITH_A_SAVE:
            assert start.latest_after == max(seen), start
        assert (start.exit_code == 0) == (start.end == ASKED), (start, _output(start)[-40:])
        assert following is None or following.latest_before == start.latest_after, start


def _check_samples(starts: Sequence[Start], whole: Start, last: int) -> None:
    """In the iterations whose effect is in the weights, every sample was trained on once, in its place, with the tokens it should have."""
    tokens = {sample: checksum for _, sample, checksum in whole.samples()}
    assert sorted(tokens) == list(range(GLOBAL_BATCH * last))
    trained: dict[int, list[int]] = defaultdict(list)
    for start in starts:
        for iteration, sample, checksum in start.samples():
            if start.latest_before < iteration <= start.latest_after:
                trained[iteration].append(sample)
                assert tokens[sample] == checksum, (start, iteration, sample)
    for iteration in range(1, last + 1):
        assert sorted(trained[iteration]) == list(range(GLOBAL_BATCH * (iteration - 1), GLOBAL_BATCH * iteration)), iteration


def _output(start: Start) -> list[str]:
    return (start.folder / "output.txt").read_text(errors="replace").splitlines()


def _wait_for(path: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Returns when there is something in the file."""
    deadline = time.monotonic() + SECONDS_TO_START
    while not (path.exists() and path.stat().st_size):
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run does not start, see {path.with_name('output.txt')}")
        time.sleep(0.05)


def _bring_about(end: str, launcher: subprocess.Popen[bytes], folder: Path, places: random.Random) -> None:
    ranks = _process_ids(folder)
    if end == ALL or (end == ONE_RANK and not ranks):
        for process in (launcher.pid, *ranks):
            _send(process, signal.SIGKILL)
    elif end == ASKED_LAUNCHER:
        _send(launcher.pid, signal.SIGTERM)
    else:
        _send(places.choice(ranks), signal.SIGTERM if end == ASKED else signal.SIGKILL)


def _end_orphans(folder: Path) -> None:
    """Ends ranks that have outlived their launcher, also those it was just starting, and returns when they are gone."""
    deadline = time.monotonic() + SECONDS_TO_END
    while processes := list(_processes_of(folder)):
        for process in processes:
            _send(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {processes} do not end")
        time.sleep(0.05)


def _processes_of(folder: Path) -> Iterator[int]:
    """Every living process that has the folder in its command line (Linux)."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder / "log.jsonl").encode() in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def _process_ids(folder: Path) -> list[int]:
    texts = [path.read_text() for path in sorted(folder.glob("rank_*.pid"))]
    return [int(text) for text in texts if text]


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _is_whole(line: str) -> bool:
    return line.endswith("}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Breaks a run for so many minutes and compares it with an unbroken one.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-later", action="store_true", help="do not compare yet: more is to come")
    options = parser.parse_args()
    soak = Soak(options.folder, options.seed)
    soak.run(options.minutes)
    if not options.check_later:
        print(json.dumps(vars(check(soak)), indent=2))


if __name__ == "__main__":
    main()
