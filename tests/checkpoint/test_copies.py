"""Files of a save that are also on the disks of other nodes: a disk may be lost, and a damaged file is read from another one."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.messages import Messages
from harness.parts import finders, held_by, held_in, loaded, on_ranks
from harness.patience import PATIENCE_SECONDS
from harness.small_state import Ranks, check_holds, set_state, state_at

from megatron_zpp.checkpoint import copies, saver, unfinished
from megatron_zpp.checkpoint.folders import complete_iterations, leftovers
from megatron_zpp.checkpoint.manifest import CheckpointError, DamagedCheckpointError
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import SaveOptions

RANKS_PER_DISK = 2
IN_BACKGROUND = SaveOptions(in_background=True)
FOLDER = "iter_0000001"


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"node {node}" for node in range(3)]


def save(disks: Sequence[Path], count: int, iteration: int = 1, options: SaveOptions | None = None) -> Ranks:
    """Saves the state of an iteration, with each file on so many disks."""
    ranks = Ranks(disks, state_at(iteration), RANKS_PER_DISK * len(disks), options, copies=count)
    ranks.save(iteration)
    ranks.finish()
    return ranks


def files_of(disk: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (disk / FOLDER).glob("*.safetensors")}


def names_of(node: int) -> set[str]:
    """The files that the ranks of a node have written."""
    return {f"rank_{RANKS_PER_DISK * node + local:05d}.safetensors" for local in range(RANKS_PER_DISK)}


def damage(path: Path) -> None:
    """Changes every chunk of data but the header's."""
    data = bytearray(path.read_bytes())
    for place in range(600, len(data), 256):
        data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("options", [SaveOptions(), IN_BACKGROUND], ids=["waiting", "in background"])
@pytest.mark.parametrize(("count", "round_bytes"), [(2, 1), (2, 1 << 23), (3, 1500)])
def test_every_file_is_on_its_own_disk_and_on_the_next_ones(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch, options: SaveOptions, count: int, round_bytes: int
) -> None:
    monkeypatch.setattr(copies, "ROUND_BYTES", round_bytes)
    ranks = save(disks, count, options=options)
    held = [files_of(disk) for disk in disks]
    for node, of_disk in enumerate(held):
        sources = [(node - step) % 3 for step in range(count)]
        assert of_disk.keys() == set().union(*map(names_of, sources))
        assert all(of_disk[name] == held[source][name] for source in sources for name in names_of(source))
        from_others = sum(len(data) for name, data in of_disk.items() if name not in names_of(node))
        assert ranks.copied_bytes[RANKS_PER_DISK * node :][:RANKS_PER_DISK] == [from_others, 0]
    assert loaded(disks, 6) == (1, 0)


@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "two nodes go on"])
def test_with_two_copies_any_disk_may_be_lost(disks: list[Path], lost: int, is_replaced: bool) -> None:
    save(disks, 2)
    shutil.rmtree(disks[lost])
    left = [disk for node, disk in enumerate(disks) if is_replaced or node != lost]
    assert loaded(left, 6)[0] == 1


def test_with_as_many_copies_as_nodes_every_disk_alone_is_a_whole_checkpoint(disks: list[Path]) -> None:
    save(disks, 3)
    for disk in disks:
        check_holds(disk / FOLDER, 1)


def test_two_lost_disks_of_which_one_had_the_copies_of_the_other_are_an_error(disks: list[Path]) -> None:
    save(disks, 2)
    for node in (1, 2):
        shutil.rmtree(disks[node])
    make = finders(disks, 6)
    with pytest.raises(CheckpointError, match=r"no node has rank_00002.safetensors, rank_00003.safetensors \("):
        on_ranks(6, lambda rank: make(rank).find(FOLDER))


def load(disks: Sequence[Path], world_size: int = 6) -> tuple[int, str]:
    """The iteration whose state all ranks load, and what rank 0 announces."""
    make, lines = finders(disks, world_size), list[str]()

    def load(rank: int) -> int:
        return held_by(make(rank), FOLDER, rank, world_size, lines.append if rank == 0 else lambda line: None)[0]

    (iteration,) = set(on_ranks(world_size, load))
    return iteration, "\n".join(lines)


@pytest.mark.parametrize("order", ["012", "102"], ids=["by a rank beside it", "by one of another node"])
def test_a_damaged_file_is_read_from_another_disk_and_named(disks: list[Path], order: str) -> None:
    save(disks, 2)
    damage(disks[1] / FOLDER / "rank_00002.safetensors")
    iteration, lines = load([disks[int(node)] for node in order])
    assert iteration == 1
    assert re.search(r"WARNING: .*rank_00002.safetensors.* is damaged: bytes .*; the copy on another node's disk is read", lines)


def test_a_file_that_cannot_be_read_on_the_disk_of_another_node_is_read_from_a_third_one(disks: list[Path]) -> None:
    save(disks, 2)
    shutil.rmtree(disks[0])  # whose ranks need files of node 0, of which node 1 has the copies, and now get them from there
    (disks[1] / FOLDER / "rank_00002.safetensors").write_bytes(b"")
    assert load(disks)[0] == 1


def test_a_file_that_is_damaged_on_all_its_disks_is_an_error_of_every_rank(disks: list[Path]) -> None:
    save(disks, 2)
    for node in (1, 2):
        damage(disks[node] / FOLDER / "rank_00002.safetensors")
    make = finders(disks, 6)

    def fail(rank: int) -> str:
        with pytest.raises(DamagedCheckpointError) as error:
            held_by(make(rank), FOLDER, rank, 6)
        return str(error.value)

    (text,) = set(on_ranks(6, fail))
    assert re.search(r"rank_00002.safetensors( on the disk of rank 4)? is damaged: bytes", text)


def test_a_checkpoint_is_good_if_each_of_its_files_is_good_on_some_disk(disks: list[Path]) -> None:
    save(disks, 2)
    damage(disks[1] / FOLDER / "rank_00002.safetensors")
    make = finders(disks, 6)

    def verify(rank: int) -> tuple[int, int, list[str], list[str]]:
        finder = make(rank)
        parts, lost, spared = finder.verified(finder.find(FOLDER))
        held = held_in(finder, parts, rank, 6) if not lost else (0, 0)
        return (*held, lost, spared)

    answers = on_ranks(6, verify)
    assert {iteration for iteration, *_ in answers} == {1} and all(lost == [] for _, _, lost, _ in answers)
    ((spared,),) = {tuple(spared) for *_, spared in answers}
    assert re.search(r"rank_00002.safetensors is damaged: bytes .* \(on node 1 \(\S+\)\)", spared)
    damage(disks[2] / FOLDER / "rank_00002.safetensors")
    assert [len(lost) for _, _, lost, _ in on_ranks(6, verify)] == [2] * 6


def test_a_tool_with_the_folders_of_all_nodes_verifies_every_copy(disks: list[Path]) -> None:
    save(disks, 2)
    damage(disks[2] / FOLDER / "rank_00002.safetensors")
    first, *others = (disk / FOLDER for disk in disks)
    with CheckpointReader(first, beside=others) as reader:
        (finding,) = reader.verify()
    assert f"{disks[2] / FOLDER / 'rank_00002.safetensors'} is damaged" in finding


@pytest.mark.parametrize("options", [SaveOptions(), IN_BACKGROUND], ids=["waiting", "in background"])
@pytest.mark.parametrize("harm", ["what is sent cannot be read", "what comes cannot be written", "what comes is damaged"])
def test_a_copy_that_fails_is_an_error_of_every_rank_and_the_run_can_save_again(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch, options: SaveOptions, harm: str
) -> None:
    state = state_at(1)
    ranks = Ranks(disks, state, 6, options, copies=2)
    ranks.save(1)
    ranks.finish()
    place = disks[1] / "iter_0000002"

    def read(path: Path, view: memoryview, start: int) -> None:
        unpatched(path, view, start)
        if path.name == "rank_00000.safetensors":
            if harm == "what is sent cannot be read":
                raise DamagedCheckpointError(f"{path} cannot be read (Input/output error)")
            view[-1] ^= 1

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    unpatched = copies.read_unverified
    with monkeypatch.context() as patch:
        if harm == "what comes cannot be written":
            patch.setattr(copies, "os", SimpleNamespace(fsync=fail))
        else:
            patch.setattr(copies, "read_unverified", read)
        with pytest.raises(CheckpointError) as error:
            ranks.save(2)
            ranks.finish()
    words = {
        "what is sent cannot be read": r"rank_00000.safetensors cannot be read \(Input/output error\) \(on node 0\)",
        "what comes cannot be written": r"cannot be written \(No space left on device\); free space or choose another folder \(on node 1\)",
        "what comes is damaged": rf"what node 0 has sent of {re.escape(str(place))}\S+rank_00000.safetensors is damaged.* \(on node 1\)",
    }
    assert re.search(words[harm], str(error.value))
    assert loaded(disks, 6) == (1, 0) and [leftovers(disk) for disk in disks] == [[]] * 3
    set_state(state, 3)
    ranks.save(3)
    ranks.finish()
    assert loaded(disks, 6) == (3, 0) and [complete_iterations(disk) for disk in disks] == [[1, 3]] * 3


def test_a_disk_needs_room_for_the_copies_too(disks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[int]] = {disk.name: set() for disk in disks}
    for count in (1, 2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(saver, "check_room", lambda folder, nbytes: asked[folder.parent.name].add(nbytes - unfinished.SPARE_BYTES))
            ranks = save(disks, count)
    by_rank = [each._share.nbytes for each in ranks.savers]
    of_disk = [sum(by_rank[2 * node : 2 * node + 2]) for node in range(3)]
    for node, disk in enumerate(disks):
        expected = [of_disk[node], of_disk[node] + of_disk[node - 1], sum(of_disk)]
        assert sorted(asked[disk.name]) == expected


def test_nobody_gives_up_while_copies_come(disks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still but for the rounds, which take less than the limit each and more than it together."""
    monkeypatch.setattr(copies, "ROUND_BYTES", 1)
    limit, now = 0.04, 0.0
    looked = threading.Event()

    def monotonic() -> float:
        looked.set()
        return now

    monkeypatch.setattr(saver, "time", SimpleNamespace(monotonic=monotonic, sleep=lambda seconds: None))
    ranks = Ranks(disks[:2], state_at(1), 4, copies=2)
    among_firsts = Messages(2)

    class Slow:
        def __init__(self, node: int) -> None:
            self._messages, self._node = among_firsts.of(node), node
            self.gather, self.broadcast = self._messages.gather, self._messages.broadcast

        def exchange(self, *arguments: Any) -> Any:
            nonlocal now
            if self._node == 0:
                looked.clear()
                assert looked.wait(PATIENCE_SECONDS)  # a main thread has waited in vain
                now += 0.9 * limit
            return self._messages.exchange(*arguments)

    for rank in (0, 2):
        ranks.savers[rank]._disk = replace(ranks.disks[rank], firsts_in_background=Slow(rank // 2), limit_seconds=limit)
    ranks.save(1)
    assert now > 10 * limit and loaded(disks[:2]) == (1, 0)
