"""Puts the process that writes a folder into the folder's name, to tell a folder in use from the leftover of a dead run."""

from __future__ import annotations

import os
import re
import socket
import time
import zlib
from pathlib import Path

ABANDONED_AFTER_SECONDS = 3600.0  # without any change, if the owner is on another machine
_TOKEN = re.compile(r"(?P<place>[0-9a-f]{8})-(?P<pid>[0-9a-f]+)-(?P<started>[0-9a-f]+)")
_ZOMBIE_STATES = "ZX"


def own_token() -> str:
    """Identifies this process: a hash of machine, boot and process namespace; the process id; its start time. All hexadecimal."""
    return f"{_place()}-{os.getpid():x}-{_start_of(os.getpid()) or 0:x}"


def is_abandoned(folder: Path, token: str) -> bool:
    """Whether no process writes this folder any more.

    If the owner of `token` belongs to this machine, this means that it is dead; else that nothing in the folder has changed for an hour.
    """
    verdict = is_dead(token)
    return time.time() - _last_change(folder) > ABANDONED_AFTER_SECONDS if verdict is None else verdict


def is_dead(token: str) -> bool | None:
    """Whether the process of the token has ended; None if it belongs to another machine or process namespace, or if it is not a token."""
    owner = _TOKEN.fullmatch(token)
    if owner is None or owner["place"] != _place() or _start_of(os.getpid()) is None:
        return None
    pid = int(owner["pid"], 16)
    return _start_of(pid) != int(owner["started"], 16) and not _is_hidden(pid)


def _last_change(folder: Path) -> float:
    newest = 0.0
    for path in (folder, *folder.glob("*")):
        try:
            # Not st_mtime: a folder that has just been renamed, or a file that was copied with its times, has an old one.
            newest = max(newest, path.lstat().st_ctime)
        except OSError:
            continue
    return newest


def _place() -> str:
    """Identifies the namespace in which a process id is unique, in 8 hexadecimal digits."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        process_ids = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        boot = process_ids = ""
    return f"{zlib.crc32(f'{socket.gethostname()} {boot} {process_ids}'.encode()):08x}"


def _is_hidden(pid: int) -> bool:
    """Whether the process exists, but /proc does not show it to this user (mounted with hidepid)."""
    if Path(f"/proc/{pid}").exists():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return False  # one of this user, which has just begun


def _start_of(pid: int) -> int | None:
    """Start time of the process in ticks since the boot; None if it is not running, or if the system has no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *after = text.rpartition(")")[2].split()  # the process name before the bracket may contain anything
    return None if state in _ZOMBIE_STATES else int(after[18])
