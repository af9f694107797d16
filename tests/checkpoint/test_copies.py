"""Files of a save that are also on the disks of other nodes: a disk may be lost, and a damaged file is read from another one."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.messages import Messages
from harness.parts import finders, held_by, held_in, loaded
from harness.patience import PATIENCE_SECONDS
from harness.rank_threads import on_ranks
from harness.small_state import CHUNK_BYTES, Ranks, check_holds, set_state, state_at

from megatron_zpp.checkpoint import copies, other_disks, reader, saver, unfinished
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


def damage(path: Path, *chunks: int) -> None:
    """Changes some chunks; by default all but those of the header."""
    data = bytearray(path.read_bytes())
    for chunk in chunks or range(2, len(data) // CHUNK_BYTES):
        data[chunk * CHUNK_BYTES] ^= 1
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
    assert iteration == 1 and lines.count("WARNING") == lines.count("is damaged") == 1
    assert re.search(r"WARNING: .*rank_00002.safetensors.* is damaged: bytes .*; a copy on another disk is read", lines)


def test_a_file_that_another_node_cannot_read_comes_from_a_third_one(disks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    save(disks, 2)
    unpatched = other_disks.read_unverified

    def read(path: Path, view: memoryview, start: int) -> None:
        if path == disks[1] / FOLDER / "rank_00002.safetensors":
            raise DamagedCheckpointError(f"{path} cannot be read (Input/output error)")
        unpatched(path, view, start)

    monkeypatch.setattr(other_disks, "read_unverified", read)
    iteration, lines = load([disks[1], disks[0], disks[2]])
    assert iteration == 1
    assert re.search(
        r"WARNING: \S+ 1/\S+rank_00002.safetensors cannot be read \(Input/output error\).*; a copy on another disk is read", lines
    )


@pytest.mark.parametrize(("order", "findings"), [("012", 2), ("102", 1)], ids=["one beside the rank", "both on other nodes"])
def test_a_file_that_is_damaged_in_other_places_on_each_of_its_disks_is_read_from_both(
    disks: list[Path], monkeypatch: pytest.MonkeyPatch, order: str, findings: int
) -> None:
    """Where both are on other nodes, a rank meets the damage of the first alone: what it lacks then it gets from the second."""
    monkeypatch.setattr(reader, "CHUNKS_AT_ONCE", 1)
    save(disks, 2)
    for node, chunk in ((1, 3), (2, 5)):
        damage(disks[node] / FOLDER / "rank_00002.safetensors", chunk)
    iteration, lines = load([disks[int(node)] for node in order])
    assert iteration == 1 and lines.count("WARNING") == findings


@pytest.mark.parametrize("harm", [lambda path: path.write_bytes(b""), lambda path: path.unlink()], ids=["empty", "missing"])
def test_a_file_that_fewer_disks_have_than_were_asked_for_is_named(disks: list[Path], harm: Callable[[Path], None]) -> None:
    save(disks, 2)
    make = finders(disks, 6)
    assert on_ranks(6, lambda rank: make(rank).find(FOLDER).notices) == [()] * 6
    harm(disks[2] / FOLDER / "rank_00002.safetensors")
    make = finders(disks, 6)
    for (notice,) in on_ranks(6, lambda rank: make(rank).find(FOLDER).notices):
        assert re.fullmatch(r"rank_00002.safetensors of \S+ \d/iter_0000001 is on fewer than 2 disks until the next save", notice)
    (disks[0] / FOLDER / "manifest.json").write_text("{}")
    make = finders(disks, 6)
    for notices in on_ranks(6, lambda rank: make(rank).find(FOLDER).notices):
        assert "manifest.json has 2 bytes without the checksum" in notices[0] and "(on node 0 (" in notices[0]
        assert notices[1].startswith("rank_00000.safetensors, rank_00001.safetensors, rank_00002.safetensors and 2 more files of ")


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

    def verify(rank: int) -> tuple[int, tuple[str, ...], list[str]]:
        finder = make(rank)
        parts, lost = finder.verified(finder.find(FOLDER))
        return 0 if lost else held_in(finder, parts, rank, 6)[0], parts.notices, lost

    answers = on_ranks(6, verify)
    assert [(iteration, lost) for iteration, _, lost in answers] == [(1, [])] * 6
    (((notice,)),) = {notices for _, notices, _ in answers}
    assert re.search(r"rank_00002.safetensors is damaged: bytes .* \(on node 1 \(\S+\)\); a copy on another disk is read", notice)
    damage(disks[2] / FOLDER / "rank_00002.safetensors")
    make = finders(disks, 6)
    assert [len(lost) for *_, lost in on_ranks(6, verify)] == [2] * 6


def test_a_tool_with_the_folders_of_all_nodes_reads_the_good_copy_and_verifies_all(
    disks: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    save(disks, 2)
    names = ("rank_00002.safetensors", "rank_00003.safetensors")
    damage(disks[1] / FOLDER / names[0])
    (disks[1] / FOLDER / names[1]).write_bytes(b"")
    first, *others = (disk / FOLDER for disk in disks)
    with CheckpointReader(first, beside=others) as reader:
        for (name, kind), values in state_at(1).items():
            assert reader.read(name, kind, 0, values.numel()).equal(values)
        findings = list(reader.verify())
    assert len(findings) == 2
    for name, finding in zip(names, findings, strict=True):
        assert finding.startswith(f"{disks[1] / FOLDER / name} ")
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(f"{finding}; the copy in another folder is read" for finding in findings)


@pytest.mark.parametrize("options", [SaveOptions(), IN_BACKGROUND], ids=["waiting", "in background"])
@pytest.mark.parametrize(
    "harm", ["what is sent cannot be read", "what comes cannot be written", "what comes is damaged", "a fault of the program"]
)
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
        elif harm == "a fault of the program":
            patch.setattr(ranks.savers[2], "_count_copied", {}.__getitem__)
        else:
            patch.setattr(copies, "read_unverified", read)
        with pytest.raises(CheckpointError) as error:
            ranks.save(2)
            ranks.finish()
    words = {
        "what is sent cannot be read": r"rank_00000.safetensors cannot be read \(Input/output error\) \(on node 0\)",
        "what comes cannot be written": r"cannot be written \(No space left on device\); free space or choose another folder \(on node 1\)",
        "a fault of the program": r"KeyError: \d+ \(on node 1\)",
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
    try:
        ranks.save(1)
    finally:
        ranks.lose_nodes()
        among_firsts.lose_a_rank()
    assert now > 10 * limit and loaded(disks[:2]) == (1, 0)
