"""Who is writing a folder, so that what a dead run left behind can be told from what a living one is writing."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

OWNER_FILE = "owner.json"
ABANDONED_AFTER_SECONDS = 3600.0  # without any change, where the owner is on another machine
_ZOMBIE_STATES = "ZX"


@dataclass(frozen=True)
class Owner:
    """A process. place: the machine, its boot and its process ids, empty where they cannot be told. started: in ticks since the boot."""

    place: str
    pid: int
    started: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def this_process() -> Owner:
    """The owner of what this process writes."""
    return Owner(_place(), os.getpid(), _start_of(os.getpid()) or "")


def is_abandoned(folder: Path) -> bool:
    """Whether nobody writes this folder any more: its owner, on this machine, is dead; or nothing in it has changed for an hour."""
    owner = _owner_of(folder)
    if owner is not None and owner.place and owner.place == _place():
        return _start_of(owner.pid) != owner.started
    return time.time() - _last_change(folder) > ABANDONED_AFTER_SECONDS


def _owner_of(folder: Path) -> Owner | None:
    try:
        return Owner(**json.loads((folder / OWNER_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _last_change(folder: Path) -> float:
    newest = 0.0
    for path in (folder, *folder.glob("*")):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return newest


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _start_of(pid: int) -> str | None:
    """When the process started; None where it is not running."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *after = text.rpartition(")")[2].split()  # the name before the bracket may hold anything
    return None if state in _ZOMBIE_STATES else after[18]
