"""Saves on two disks where one of them dies or fails: the next run finds the old or the new checkpoint whole, at every moment."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from harness.parts import at_call, loaded
from harness.patience import PATIENCE_SECONDS
from harness.rank_threads import on_ranks
from harness.small_state import Ranks, manifest_at, set_state, state_at

from megatron_zpp.checkpoint import folders, parts, saver, unfinished
from megatron_zpp.checkpoint.disk import Gather, OneRank
from megatron_zpp.checkpoint.folders import leftovers
from megatron_zpp.checkpoint.manifest import CheckpointError
from megatron_zpp.checkpoint.parts import finish_interrupted_save
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions
from megatron_zpp.system.owner import own_token

WORLD_SIZE, NO_SUCH_MOMENT = 4, 200
WAITING, IN_BACKGROUND = SaveOptions(keep_last=1), SaveOptions(in_background=True, keep_last=1)
# The node that is hit, how it saves, whether the save replaces the only checkpoint, and on how many disks each file is.
SHORT = {
    "node 0, waiting, the same iteration": (0, WAITING, True, 1),
    "node 1, in background, a new iteration": (1, IN_BACKGROUND, False, 1),
    "node 1, waiting, the same iteration, with copies": (1, WAITING, True, 2),
}
CASES = [
    *(pytest.param(*case, id=name) for name, case in SHORT.items()),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in product((0, 1), (WAITING, IN_BACKGROUND), (False, True), (1, 2))
        if case not in SHORT.values()
    ),
]


class NodeLost(OSError):
    """A call on the disk of a node that has died."""


def moments(folder: Path, copies: int) -> Iterator[tuple[int, list[Path]]]:
    """Moments, counted from 1, each with two disks of its own that have iteration 1."""
    base = [folder / "node 0", folder / "node 1"]
    Ranks(base, state_at(1), WORLD_SIZE, copies=copies).save(1)
    for moment in range(1, NO_SUCH_MOMENT):
        place = folder / f"moment {moment}"
        yield moment, [Path(shutil.copytree(disk, place / disk.name)) for disk in base]
        shutil.rmtree(place)


def next_run(disks: Sequence[Path]) -> int:
    """The iteration whose state the next run loads from the two disks, which it finds whole. Then it saves as if nothing had happened."""
    state = state_at(0)
    ranks = Ranks(disks, state, WORLD_SIZE)
    firsts = {disk.ranks[0]: disk for disk in ranks.disks if disk.is_first}

    def finish(rank: int) -> None:
        if rank in firsts:
            finish_interrupted_save(disks[firsts[rank].index], firsts[rank])

    without_save = loaded(disks)  # a run that only loads changes nothing
    on_ranks(WORLD_SIZE, finish)
    held, nbytes = loaded(disks)
    assert without_save == (held, nbytes) == (held, 0)
    set_state(state, 3)
    ranks.save(3)
    assert loaded(disks) == (3, 0) and [leftovers(disk) for disk in disks] == [[], []]
    return held


@pytest.mark.parametrize(("victim", "options", "replaces", "copies"), CASES)
def test_a_node_that_dies_at_any_moment_of_a_save_costs_no_checkpoint(
    tmp_path: Path, victim: int, options: SaveOptions, replaces: bool, copies: int
) -> None:
    seen = set()
    for moment, disks in moments(tmp_path, copies):
        ranks = Ranks(disks, state_at(2), WORLD_SIZE, options, copies=copies)

        def die(ranks: Ranks = ranks) -> None:
            ranks.lose_nodes()
            raise NodeLost

        with of_a_process_that_ends(), at_call(disks[victim], moment, die, stays=True) as calls:
            is_saved = saves(ranks, 1 if replaces else 2)
        if copies == 2:
            check_the_other_disk_is_enough(disks, victim, tmp_path / f"without {moment}", is_saved=is_saved)
        held = next_run(disks)
        assert held == 2 or not is_saved
        seen.add(held)
        if len(calls) < moment:
            break
    assert moment > 15 and is_saved and seen == {1, 2}


def check_the_other_disk_is_enough(disks: Sequence[Path], victim: int, folder: Path, *, is_saved: bool) -> None:
    """Asserts that without the disk of the node that died the next run finds a whole checkpoint."""
    left = list(disks)
    left[victim] = folder
    held, _ = loaded(left)
    assert held == 2 or not is_saved


@contextmanager
def of_a_process_that_ends() -> Iterator[None]:
    """Gives what a save leaves the token of a process that has ended by the end of the block."""
    token = f"{own_token()}0"
    with pytest.MonkeyPatch.context() as patch:
        for module in (folders, saver, unfinished):
            patch.setattr(module, "own_token", lambda: token)
        yield


def saves(ranks: Ranks, iteration: int) -> bool:
    """Whether a save ends without an error. Waits for its threads."""
    try:
        ranks.save(iteration)
        ranks.finish()
    except (CheckpointError, threading.BrokenBarrierError, NodeLost):
        return False
    finally:
        for each in ranks.savers:
            if each._save is not None:
                each._save.given_up.set()  # as a process that ends
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
    return True


@pytest.mark.parametrize(("victim", "options", "replaces", "copies"), CASES)
def test_a_call_that_fails_at_any_moment_of_a_save_costs_no_checkpoint_and_the_run_can_save_again(
    tmp_path: Path, victim: int, options: SaveOptions, replaces: bool, copies: int
) -> None:
    outcomes = []
    for moment, disks in moments(tmp_path, copies):
        state = state_at(2)
        ranks = Ranks(disks, state, WORLD_SIZE, options, copies=copies)

        def fail() -> None:
            raise OSError(5, "Input/output error")

        with at_call(disks[victim], moment, fail, stays=False) as calls:
            outcomes.append(saves(ranks, 1 if replaces else 2))
        if moment % 2:
            set_state(state, 4)
            assert saves(ranks, 4) and loaded(disks) == (4, 0)
        else:
            held = next_run(disks)
            assert held == 2 or not outcomes[-1]
        if len(calls) < moment:
            break
    assert len(outcomes) > 15 and outcomes[-1] and not all(outcomes)


@pytest.fixture
def half_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Path], Ranks]:
    """Two disks after a save that replaces the only checkpoint by a state 2, of which node 1 could not give its part the name."""
    disks = [tmp_path / "node 0", tmp_path / "node 1"]
    Ranks(disks, state_at(1), WORLD_SIZE).save(1)
    ranks = Ranks(disks, state_at(2), WORLD_SIZE)
    refuse(monkeypatch, saver, "put_in_place", disks[1])
    assert not saves(ranks, 1)
    return disks, ranks


def refuse(patch: pytest.MonkeyPatch, module: Any, name: str, directory: Path) -> None:
    """Lets a function of the module fail for paths in the directory."""
    call = getattr(module, name)

    def fail_there(path: Path, *arguments: Any) -> Any:
        if str(path).startswith(str(directory)):
            raise OSError(5, "Input/output error", str(path))
        return call(path, *arguments)

    patch.setattr(module, name, fail_there)


@pytest.mark.parametrize(("function", "node"), [("_named_in", 0), ("put_in_place", 1), ("_named_in", 1)])
def test_what_a_disk_has_not_named_yet_outlives_a_second_failure(
    half_named: tuple[list[Path], Ranks], monkeypatch: pytest.MonkeyPatch, function: str, node: int
) -> None:
    disks, ranks = half_named
    with monkeypatch.context() as patch:
        refuse(patch, parts, function, disks[node])
        assert not saves(ranks, 1)
    monkeypatch.undo()
    assert next_run(disks) == 2


def test_a_run_that_has_lost_its_lock_names_nothing_that_an_earlier_save_left(half_named: tuple[list[Path], Ranks]) -> None:
    disks, ranks = half_named

    def lose() -> None:
        raise CheckpointError("the lock is lost")

    ranks.savers[2]._check_lock = lose
    before = {path.name for path in disks[1].iterdir()}
    assert not saves(ranks, 1) and {path.name for path in disks[1].iterdir()} == before


def test_a_message_that_reaches_one_node_alone_costs_no_checkpoint(tmp_path: Path) -> None:
    """Node 1 does not learn that all nodes have sealed the checkpoint, and does not name it; node 0 does."""
    disks = [tmp_path / "node 0", tmp_path / "node 1"]
    Ranks(disks, state_at(1), WORLD_SIZE).save(1)
    ranks = Ranks(disks, state_at(2), WORLD_SIZE)
    first = ranks.disks[2]
    count = 0

    def lose_the_second(text: str) -> list[str]:
        nonlocal count
        count += 1
        found = first.firsts.gather(text)
        if count == 2:  # what was written, what is sealed
            first.firsts.gather(json.dumps([None, "the connection is lost"]))  # so that node 0 need not wait for its next answer
            raise RuntimeError("the connection is lost")
        return found

    ranks.savers[2]._disk = replace(first, firsts_in_background=gathering_by(lose_the_second))
    assert not saves(ranks, 1)
    assert next_run(disks) == 2


def gathering_by(gather: Gather) -> OneRank:
    """Messages of a rank whose texts are gathered by this function."""
    messages = OneRank()
    messages.gather = gather  # type: ignore[method-assign]
    return messages


@pytest.mark.parametrize("options", [WAITING, IN_BACKGROUND], ids=["waiting", "in background"])
def test_the_main_thread_does_not_wait_forever_for_a_disk_and_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: SaveOptions
) -> None:
    """The disk of node 0 hangs."""
    released = threading.Event()
    disks = [tmp_path / "node 0", tmp_path / "node 1"]
    ranks = Ranks(disks, state_at(1), WORLD_SIZE, options)
    unpatched = saver.seal

    def seal(folder: Path, *arguments: Any) -> str:
        if folder.parent == disks[0]:
            assert released.wait(PATIENCE_SECONDS)
        return unpatched(folder, *arguments)

    monkeypatch.setattr(saver, "seal", seal)
    for rank in (0, 2):
        ranks.savers[rank]._disk = replace(ranks.disks[rank], limit_seconds=0.05)
    said = {}

    def save(each: CheckpointSaver) -> None:
        try:
            each.save(manifest_at(1))
            each.finish()
        except threading.BrokenBarrierError:
            pass  # it has waited for one that has given up
        except RuntimeError as error:
            said[each._disk.rank] = str(error)
            ranks.lose_nodes()

    ranks.on_each(save)
    released.set()
    words = {0: rf"the disk of this node, with {disks[0]}, has", 2: "the disks of other nodes have"}
    assert said and all(re.fullmatch(f"{words[rank]} not gone on with a save for 0 s", text) for rank, text in said.items())
