"""Whose folder an unfinished one is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_zpp.checkpoint.owner import ABANDONED_AFTER_SECONDS, OWNER_FILE, Owner, is_abandoned, this_process


def owned_by(folder: Path, owner: Owner, age_seconds: float = 0.0) -> Path:
    (folder / OWNER_FILE).write_text(owner.to_json())
    then = time.time() - age_seconds
    for path in (folder / OWNER_FILE, folder):
        os.utime(path, (then, then))
    return folder


def test_what_a_living_process_writes_is_not_abandoned_however_old(tmp_path: Path) -> None:
    assert not is_abandoned(owned_by(tmp_path, this_process(), age_seconds=1e6))


def test_what_a_dead_process_wrote_is_abandoned_at_once(tmp_path: Path) -> None:
    code = "from megatron_zpp.checkpoint.owner import this_process; print(this_process().to_json())"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    (tmp_path / OWNER_FILE).write_text(text)
    assert is_abandoned(tmp_path)


def test_another_process_with_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    assert is_abandoned(owned_by(tmp_path, replace(this_process(), started="1")))


def test_a_killed_process_that_nobody_has_waited_for_is_dead(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        owned_by(tmp_path, this_process())
        os._exit(0)
    while not (tmp_path / OWNER_FILE).exists() or Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert is_abandoned(tmp_path)
    os.waitpid(child, 0)


@pytest.mark.parametrize("place", ["another machine", ""])
def test_on_another_machine_only_an_hour_without_change_tells(tmp_path: Path, place: str) -> None:
    other = replace(this_process(), place=place)
    assert not is_abandoned(owned_by(tmp_path, other))
    assert is_abandoned(owned_by(tmp_path, other, ABANDONED_AFTER_SECONDS + 60))
    (tmp_path / "rank_00001.safetensors").write_text("just now")
    assert not is_abandoned(tmp_path)


def test_a_folder_without_an_owner_is_judged_by_its_age(tmp_path: Path) -> None:
    assert not is_abandoned(tmp_path)
    (tmp_path / OWNER_FILE).write_text("{")
    assert not is_abandoned(tmp_path)
