"""One run at a time saves into a folder, and a run that has died does not keep it from the next."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from harness.dying import child, die_at

from megatron_zpp.checkpoint import run_lock
from megatron_zpp.checkpoint.folders import iteration_folder
from megatron_zpp.checkpoint.manifest import CheckpointError
from megatron_zpp.checkpoint.release import write_release
from megatron_zpp.checkpoint.run_lock import LOCK_FILE, FolderInUse, Holder, Job, RunLock, take_lock
from megatron_zpp.system.owner import own_token
from megatron_zpp.system.user_error import UserError

ELSEWHERE = Holder("0123456789abcdef", "node7", 4711, "00000000-1-1", "2026-01-02 03:04:05+00:00", "", 0)


def take(directory: Path, job: Job | None = None, lines: list[str] | None = None) -> RunLock:
    return take_lock(directory, job or Job(), [].append if lines is None else lines.append)


def put(directory: Path, holder: Holder) -> None:
    (directory / LOCK_FILE).write_text(json.dumps(asdict(holder)))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(run_lock, "LOOK_EVERY_SECONDS", 0.01)


def test_a_second_run_is_refused_in_one_sentence_that_names_the_first(tmp_path: Path) -> None:
    first = take(tmp_path, Job("1234"))
    with pytest.raises(FolderInUse) as refusal:
        take(tmp_path)
    pattern = (
        rf"--save {tmp_path} is in use by process {os.getpid()} on {re.escape(socket.gethostname())} \(since [-0-9]+ [:0-9]+[+-][:0-9]+, "
        r"job 1234\); only one run at a time may save into a folder, so give another --save, or end that run first"
    )
    assert re.fullmatch(pattern, str(refusal.value))
    first.check()
    first.release()
    assert names(tmp_path) == []
    take(tmp_path).release()


def test_weights_are_not_written_into_the_folder_of_a_living_run(tmp_path: Path) -> None:
    run = take(tmp_path)
    with pytest.raises(FolderInUse, match=f"--output {tmp_path} is in use by process {os.getpid()}"):
        write_release(tmp_path, [], lambda _: torch.empty(0), {})
    run.release()
    write_release(tmp_path, [], lambda _: torch.empty(0), {})
    assert names(tmp_path) == ["latest_checkpointed_iteration.txt", "release"]


def test_converted_weights_do_not_take_the_place_of_a_runs_checkpoints(tmp_path: Path) -> None:
    iteration_folder(tmp_path, 7).mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(UserError, match=r"^--output .* holds iteration 7 of a run, .*; choose a new folder\.$"):
        write_release(tmp_path, [], lambda _: torch.empty(0), {})
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert names(tmp_path) == ["iter_0000007", "latest_checkpointed_iteration.txt"]


def test_converted_weights_delete_neither_the_release_nor_the_number_of_another_program(tmp_path: Path) -> None:
    weights = tmp_path / "release" / "mp_rank_00" / "model_optim_rng.pt"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"of Megatron")
    with pytest.raises(
        ValueError, match=r"^--output .* holds release, which is no checkpoint of this program and .*; choose a new folder\.$"
    ):
        write_release(tmp_path, [], lambda _: torch.empty(0), {})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")  # of global_step100, as of Megatron-DeepSpeed
    with pytest.raises(UserError, match=r"^--output .* holds latest_checkpointed_iteration.txt of a run, .*; choose a new folder\.$"):
        write_release(tmp_path, [], lambda _: torch.empty(0), {})
    assert weights.read_bytes() == b"of Megatron"


def test_weights_are_not_written_where_the_number_of_a_run_cannot_be_read(tmp_path: Path) -> None:
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_bytes(b"\xff")
    with pytest.raises(UserError, match=f"^{latest} is not UTF-8 text .*; choose a new folder for --output\\.$"):
        write_release(tmp_path, [], lambda _: torch.empty(0), {})
    assert latest.read_bytes() == b"\xff"


def test_the_lock_of_a_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    os.waitpid(child(lambda: take(tmp_path)), 0)
    assert names(tmp_path) == [LOCK_FILE]
    lines: list[str] = []
    take(tmp_path, lines=lines).check()
    assert lines == [] and names(tmp_path) == [LOCK_FILE]


def test_a_process_with_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    place, pid, _ = own_token().split("-")
    put(tmp_path, replace(ELSEWHERE, token=f"{place}-{pid}-1"))
    take(tmp_path).check()


@pytest.mark.usefixtures("_impatient")
def test_a_holder_on_another_machine_that_stays_silent_is_replaced_after_a_wait_that_is_announced(tmp_path: Path) -> None:
    put(tmp_path, ELSEWHERE)
    lines: list[str] = []
    take(tmp_path, lines=lines).check()
    assert len(lines) == 1
    assert "was in use by process 4711 on node7 (since 2026-01-02 03:04:05+00:00)" in lines[0] and "waiting up to" in lines[0]


def test_a_holder_on_another_machine_whose_heart_beats_keeps_the_folder_whatever_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "LOOK_EVERY_SECONDS", 0.01)
    put(tmp_path, ELSEWHERE)
    seconds = iter(range(10**6))

    def beat_with_a_clock_of_1970(_: str) -> None:
        threading.Timer(0.1, lambda: os.utime(tmp_path / LOCK_FILE, (next(seconds), next(seconds)))).start()

    os.utime(tmp_path / LOCK_FILE, (0, 0))
    with pytest.raises(FolderInUse, match="process 4711 on node7"):
        take_lock(tmp_path, Job(), beat_with_a_clock_of_1970)


def test_a_lock_that_is_released_while_it_is_watched_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "LOOK_EVERY_SECONDS", 0.01)
    put(tmp_path, ELSEWHERE)
    take_lock(tmp_path, Job(), lambda _: (tmp_path / LOCK_FILE).unlink()).check()


@pytest.mark.parametrize(
    "job", [Job("12 of big", restarts=1), Job(former_lock=ELSEWHERE.id)], ids=["requeued by Slurm", "restarted by torchrun"]
)
def test_a_later_start_of_the_same_job_takes_over_from_another_machine_at_once(tmp_path: Path, job: Job) -> None:
    put(tmp_path, replace(ELSEWHERE, job="12 of big"))
    lines: list[str] = []
    take(tmp_path, job, lines).check()
    assert lines == []


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("job", [Job("12 of big"), Job("13 of big", restarts=1), Job(former_lock="other")], ids=repr)
def test_another_step_or_job_has_to_watch(tmp_path: Path, job: Job) -> None:
    put(tmp_path, replace(ELSEWHERE, job="12 of big"))
    lines: list[str] = []
    take(tmp_path, job, lines)
    assert len(lines) == 1


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 1}', json.dumps({**asdict(ELSEWHERE), "process": "1"}), "[" * 60_000])
def test_a_lock_that_names_nobody_is_watched_as_well(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    lines: list[str] = []
    take(tmp_path, lines=lines).check()
    assert len(lines) == 1 and "a run that its lock does not name" in lines[0]


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    lock = take(tmp_path)
    os.utime(lock.path, (0, 0))
    pause = threading.Event()
    while lock.path.stat().st_mtime == 0:
        pause.wait(0.01)
    lock.release()


def test_a_lock_that_has_vanished_or_changed_hands_is_noticed_and_left_alone(tmp_path: Path) -> None:
    lock = take(tmp_path)
    lock.path.unlink()
    with pytest.raises(CheckpointError, match=f"--save {tmp_path} is no longer this run's, because run.lock was removed; only the run"):
        lock.check()
    put(tmp_path, ELSEWHERE)
    with pytest.raises(CheckpointError, match="because run.lock belongs to process 4711 on node7"):
        lock.check()
    lock.release()
    assert json.loads(lock.path.read_text()) == asdict(ELSEWHERE) and names(tmp_path) == [LOCK_FILE]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("target", path)], ids=["fifo", "folder", "link"])
def test_what_is_not_a_file_is_refused_and_nothing_is_written_through_it(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK_FILE)
    with pytest.raises(CheckpointError, match="run.lock is not a regular file, so no run made it; remove it"):
        take(tmp_path)
    assert names(tmp_path) == [LOCK_FILE]


@pytest.mark.parametrize("is_left_by_a_dead_run", [False, True], ids=["free", "of a dead run"])
def test_of_processes_that_come_at_once_exactly_one_gets_the_folder(tmp_path: Path, is_left_by_a_dead_run: bool) -> None:
    for round in range(2):
        folder = tmp_path / str(round)
        folder.mkdir()
        if is_left_by_a_dead_run:
            os.waitpid(child(lambda folder=folder: take(folder)), 0)
        taken, go = [os.pipe() for _ in range(2)]

        def come(folder: Path = folder, taken: tuple[int, int] = taken, go: tuple[int, int] = go) -> None:
            os.read(go[0], 1)
            try:
                take(folder)
            except FolderInUse:
                os.write(taken[1], b"0")
            except BaseException:
                os.write(taken[1], b"?")
                raise
            else:
                os.write(taken[1], b"1")
            threading.Event().wait()

        pids = [child(come) for _ in range(6)]
        os.write(go[1], b"g" * 6)
        answers = b"".join(os.read(taken[0], 1) for _ in pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert sorted(answers) == sorted(b"000001"), answers
        for end in (*taken, *go):
            os.close(end)


def test_a_file_system_without_links_has_the_lock_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    lock = take(tmp_path)
    with pytest.raises(FolderInUse):
        take(tmp_path)
    lock.release()
    assert names(tmp_path) == []


def lock_of_the_dead(directory: Path) -> None:
    put(directory, replace(ELSEWHERE, token="-".join([*own_token().split("-")[:2], "1"])))


@pytest.mark.parametrize("act", ["taking", "taking over", "releasing"])
def test_whenever_a_process_dies_that_takes_or_releases_the_lock_the_next_one_takes_it_at_once(tmp_path: Path, act: str) -> None:
    for moment in range(1, 100):
        if act == "taking over":
            lock_of_the_dead(tmp_path)
        pid = child(lambda moment=moment: (die_at(moment), take(tmp_path).release() if act == "releasing" else take(tmp_path)))
        was_killed = os.waitpid(pid, 0)[1] != 0
        lines: list[str] = []
        lock = take(tmp_path, lines=lines)
        lock.check()
        lock.release()
        assert names(tmp_path) == [] and lines == []
        if not was_killed:
            break
    assert 3 < moment < 99


def test_claims_of_processes_that_died_one_after_the_other_do_not_pile_up(tmp_path: Path) -> None:
    lock_of_the_dead(tmp_path)
    for moment in range(1, 20):
        os.waitpid(child(lambda moment=moment: (die_at(moment), take(tmp_path))), 0)
    take(tmp_path).release()
    assert names(tmp_path) == []


def test_a_lock_on_a_full_disk_says_so_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    words = r"run.lock cannot be read or written \(No space left on device\); free space there, or choose another folder$"
    with pytest.raises(CheckpointError, match=f"^--output {tmp_path}: {words}"):
        take(tmp_path, Job(flag="--output"))
    assert names(tmp_path) == []
