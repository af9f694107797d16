"""Which process an unfinished folder belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_zpp.system.owner import ABANDONED_AFTER_SECONDS, is_abandoned, own_token


def aged(folder: Path, seconds: float) -> Path:
    then = time.time() - seconds
    os.utime(folder, (then, then))
    return folder


def test_what_a_living_process_writes_is_not_abandoned_however_old(tmp_path: Path) -> None:
    assert not is_abandoned(aged(tmp_path, 1e6), own_token())


def test_what_a_dead_process_wrote_is_abandoned_at_once(tmp_path: Path) -> None:
    code = "from megatron_zpp.system.owner import own_token; print(own_token())"
    token = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert is_abandoned(tmp_path, token)


def test_another_process_with_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    place, pid, _ = own_token().split("-")
    assert is_abandoned(tmp_path, f"{place}-{pid}-1")


def test_a_killed_process_that_nobody_has_waited_for_is_dead(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        (tmp_path / "token").write_text(own_token())
        os._exit(0)
    while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert is_abandoned(tmp_path, (tmp_path / "token").read_text())
    os.waitpid(child, 0)


@pytest.mark.parametrize("token", ["00000000-1-1", "ab12"])
def test_on_another_machine_only_an_hour_without_change_tells(tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_abandoned(tmp_path, token)
    changed = tmp_path.stat().st_ctime
    monkeypatch.setattr(time, "time", lambda: changed + ABANDONED_AFTER_SECONDS + 60)
    assert is_abandoned(tmp_path, token)
    monkeypatch.setattr(time, "time", lambda: changed + ABANDONED_AFTER_SECONDS - 60)
    assert not is_abandoned(tmp_path, token)


def test_a_complete_folder_that_another_machine_has_just_renamed_is_not_abandoned_however_old_its_files_are(tmp_path: Path) -> None:
    """As .replaced and .removed folders are: renaming leaves their times of writing as they were."""
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "manifest.json").touch()
    aged(tmp_path / "iter_0000001" / "manifest.json", 1e6)
    replaced = aged(tmp_path / "iter_0000001", 1e6).rename(tmp_path / "iter_0000001.replaced-00000000-1-1")
    assert not is_abandoned(replaced, "00000000-1-1")
