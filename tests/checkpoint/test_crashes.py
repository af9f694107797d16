"""Runs that die while they save: every folder is then either a good checkpoint or not taken for one, and older ones still exist."""

from __future__ import annotations

import os
import random
import re
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.dying import child, die_at
from harness.small_state import Ranks, check_holds, set_state, state_at

from megatron_zpp.checkpoint.folders import complete_iterations, find_checkpoint, iteration_folder, leftovers
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import SaveOptions

NO_SUCH_MOMENT = 100


def state_of(folder: Path) -> int:
    """The iteration whose state a checkpoint of iteration 1 holds. Every byte of it must be as written."""
    for iteration in (1, 2):
        try:
            with CheckpointReader(folder) as reader:
                assert list(reader.verify()) == []
            _check_values(folder, iteration)
            return iteration
        except AssertionError:
            continue
    raise AssertionError(f"{folder} holds neither state")


def _check_values(folder: Path, iteration: int) -> None:
    with CheckpointReader(folder) as reader:
        for (name, kind), values in state_at(iteration).items():
            assert reader.read(name, kind, 0, values.numel()).equal(values)


def content(directory: Path, pid: int) -> frozenset[tuple[str, int, bytes]]:
    """Name, links and bytes of everything below the folder; the process that wrote it, which names of unfinished folders hold, left out."""
    found = [(re.sub(f"-{pid:x}-[0-9a-f]+", "", str(path.relative_to(directory))), path) for path in directory.rglob("*")]
    return frozenset((name, path.lstat().st_nlink, path.read_bytes() if path.is_file() else b"") for name, path in found)


def crash_at_every_moment(base: Path, save: Callable[[Path], None], check: Callable[[Path], bool]) -> list[bool]:
    """Kills `save` at its first, second, ... moment, on a fresh copy of `base` each. Returns what `check` says of each copy.

    Copies that are alike byte for byte are checked once.
    """
    seen, checked = [], dict[frozenset[tuple[str, int, bytes]], bool]()
    for moment in range(1, NO_SUCH_MOMENT):
        directory = base.with_name(f"moment {moment}")
        shutil.copytree(base, directory)

        def die_saving(directory: Path = directory, moment: int = moment) -> None:
            die_at(moment)
            save(directory)

        pid, status = os.waitpid(child(die_saving), 0)
        left = content(directory, pid)
        if left not in checked:
            checked[left] = check(directory)
        seen.append(checked[left])
        shutil.rmtree(directory)
        if os.waitstatus_to_exitcode(status) == 0:
            return seen
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    raise AssertionError("the save never comes to its end")


@pytest.mark.parametrize(
    "options", [SaveOptions(keep_last=1), SaveOptions(in_background=True, keep_last=1)], ids=["waiting", "in background"]
)
def test_a_run_that_dies_at_any_moment_of_a_save_leaves_a_checkpoint_to_load(tmp_path: Path, options: SaveOptions) -> None:
    base = tmp_path / "base"
    Ranks(base, state_at(1)).save(1)

    def save(directory: Path) -> None:
        ranks = Ranks(directory, state_at(2), options=options)
        ranks.save(2)
        ranks.finish()

    def is_saved(directory: Path) -> bool:
        complete = complete_iterations(directory)
        assert set(complete) <= {1, 2} and complete
        for iteration in complete:
            check_holds(iteration_folder(directory, iteration), iteration)
        found = find_checkpoint(directory, None)
        assert found is not None and int(found.name[5:]) in complete
        Ranks(directory, state_at(3)).save(3)
        assert leftovers(directory) == []
        return found == iteration_folder(directory, 2)

    seen = crash_at_every_moment(base, save, is_saved)
    assert len(seen) > 15 and seen == sorted(seen) and seen[-1]


def test_a_run_that_dies_replacing_a_checkpoint_leaves_the_old_or_the_new_one_at_every_moment(tmp_path: Path) -> None:
    base = tmp_path / "base"
    Ranks(base, state_at(1)).save(1)

    def is_replaced(directory: Path) -> bool:
        folder = find_checkpoint(directory, None)
        assert folder is not None
        held = state_of(folder)
        Ranks(directory, state_at(3)).save(3)
        assert leftovers(directory) == [] and state_of(iteration_folder(directory, 1)) == held
        return held == 2

    seen = crash_at_every_moment(base, lambda directory: Ranks(directory, state_at(2)).save(1), is_replaced)
    assert len(seen) > 15 and seen == sorted(seen) and seen[-1]


def kill_at_random(directory: Path, options: SaveOptions, seed: int) -> None:
    """Kills a run that saves without pause: no finished checkpoint is lost, and no unfinished one is taken for finished."""
    told, tell = os.pipe()

    def save_without_pause() -> None:
        state = state_at(0)
        ranks = Ranks(directory, state, options=options)
        for iteration in range(1, 10_000):
            set_state(state, iteration)
            ranks.save(iteration)
            if not options.in_background:
                os.write(tell, b"%d\n" % iteration)
            else:
                done = ranks.savers[0].check()
                os.write(tell, b"%d\n" % (done.iteration if done is not None else iteration - 1))

    pid = child(save_without_pause)
    os.close(tell)
    select.select([told], [], [], 60)
    time.sleep(random.Random(seed).uniform(0, 0.2))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(told) as pipe:
        finished = max(int(line) for line in pipe.read().splitlines())
    complete = complete_iterations(directory)
    assert complete == list(range(1, len(complete) + 1)) and len(complete) >= finished
    for iteration in complete[-3:]:
        check_holds(iteration_folder(directory, iteration), iteration)
    latest = find_checkpoint(directory, None)
    if complete:
        assert latest in [iteration_folder(directory, iteration) for iteration in complete[-2:]] or finished == 0
    Ranks(directory, state_at(99_999)).save(99_999)
    assert leftovers(directory) == []


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_at_a_random_time_loses_no_finished_checkpoint(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path / "saved", SaveOptions(in_background=seed % 2 == 1), seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 150))
def test_fifty_more_runs_killed_at_random_times_lose_no_finished_checkpoint(tmp_path: Path, seed: int) -> None:
    kill_at_random(tmp_path / "saved", SaveOptions(in_background=seed % 2 == 1), seed)
