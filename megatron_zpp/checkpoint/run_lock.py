"""The lock of a --save folder: one run at a time saves there, whatever the file system, and takes over from a run that has died.

    DIR/run.lock               JSON that names the holder; the holder renews its mtime every HEARTBEAT_SECONDS
    DIR/run.lock.over-ID       a claim to the lock or claim ID, of the same form: its holder alone may replace or remove that one
    DIR/run.lock.new-TOKEN     a lock that is about to get its name

The holder is dead if its process has ended, which only its own machine can tell; if it is an earlier start of the same job; or if
run.lock has not changed for SILENT_SECONDS while somebody watched. Clocks of two machines are never compared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from threading import Event, Thread

from megatron_zpp.checkpoint.durable import write_durably
from megatron_zpp.checkpoint.manifest import CheckpointError
from megatron_zpp.system.output_file import remedy_for
from megatron_zpp.system.outside import OutsideFile, open_regular
from megatron_zpp.system.owner import is_abandoned, is_dead, own_token

LOCK_FILE = "run.lock"
HEARTBEAT_SECONDS = 10.0
SILENT_SECONDS = 180.0  # far above the heartbeat and the minute for which clients of network file systems keep attributes
LOOK_EVERY_SECONDS = 1.0
SHORT_SECONDS = 0.02  # until another process, which is replacing the lock, is done
RELEASE_SECONDS = 5.0  # a file system that does not answer must not keep a run from ending
LARGEST_BYTES = 1 << 16
NOT_A_FILE = (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO)  # errors of `open_regular` for links, pipes, folders and sockets
NO_LINKS_HERE = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Job:
    """What a scheduler or launcher says about this start of the run, and the flag that names the folder.

    name: the job's id; empty without a scheduler. restarts: how often the scheduler has started the job again, after it had ended all
    processes of the earlier start. former_lock: id of the lock that an earlier start of this very job held. own_processes: tokens of other
    processes of this run, whose folders must be others.
    """

    name: str = ""
    restarts: int = 0
    former_lock: str = ""
    flag: str = "--save"
    own_processes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Holder:
    """The content of a lock. token: see `owner`. id: different for every lock."""

    id: str
    host: str
    process: int
    token: str
    since: str
    job: str
    restarts: int

    @classmethod
    def this_process(cls, job: Job) -> Holder:
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        return cls(secrets.token_hex(8), socket.gethostname(), os.getpid(), own_token(), now, job.name, job.restarts)

    def __str__(self) -> str:
        if not self.token:
            return "a run that its lock does not name"
        of_job = f", job {self.job}" if self.job else ""
        return f"process {self.process} on {self.host} (since {self.since}{of_job})"


NOBODY = Holder("", "", 0, "", "", "", 0)


class FolderInUse(CheckpointError):
    """Another living run holds the lock."""


@dataclass(frozen=True)
class _Seen:
    """A lock as it was read. beat: changes with every heartbeat."""

    holder: Holder
    beat: tuple[int, ...]


@dataclass
class RunLock:
    """The lock that this process holds. Make it with `take_lock`. flag: names the folder, for errors."""

    path: Path
    holder: Holder
    flag: str = "--save"
    _released: Event = field(default_factory=Event)

    def check(self) -> None:
        """Raises CheckpointError if the lock is not this process's any more."""
        found = _read(self.path)
        if found is None or found.holder.id != self.holder.id:
            why = "was removed" if found is None else f"belongs to {found.holder}"
            raise CheckpointError(
                f"{self.flag} {self.path.parent} is no longer this run's, because {self.path.name} {why}; only the run that holds it may "
                "save, so this one ends; start it again if no other run saves there, and it goes on from the latest checkpoint"
            )

    def release(self) -> None:
        """Removes the lock if it is still this process's. Returns after RELEASE_SECONDS even if the file system does not answer."""
        self._released.set()
        thread = Thread(target=self._remove, daemon=True)
        thread.start()
        thread.join(RELEASE_SECONDS)

    def keep_alive(self) -> None:
        """Renews the heartbeat from a thread until the release."""
        descriptor = open_regular(self.path, follows_links=False)  # a file that takes the place of the lock is not touched
        Thread(target=self._beat, args=(descriptor,), name="lock of --save", daemon=True).start()

    def _beat(self, descriptor: int) -> None:
        try:
            while not self._released.wait(HEARTBEAT_SECONDS):
                with contextlib.suppress(OSError):  # `check` tells whether the lock is lost
                    os.utime(descriptor)  # without times: the file server's clock
        finally:
            os.close(descriptor)

    def _remove(self) -> None:
        with contextlib.suppress(OSError, CheckpointError), _alone_over(self.path, self.holder.id, Job()) as may_remove:
            if may_remove:
                self.path.unlink()


def take_lock(directory: Path, job: Job, announce: Callable[[str], None]) -> RunLock:
    """Takes the lock of a folder, which must exist, for this process.

    announce: receives a line if the holder has to be watched, which takes up to SILENT_SECONDS.
    Raises FolderInUse, naming the holder, if it lives; CheckpointError if the lock cannot be read or written.
    """
    path = directory / LOCK_FILE
    try:
        lock = _take(path, job, announce)
        lock.keep_alive()
    except OSError as error:
        raise CheckpointError(
            f"{job.flag} {directory}: {path.name} cannot be read or written ({error.strerror}); {remedy_for(error)}"
        ) from error
    _clean_up(path, lock.holder)
    return lock


def _take(path: Path, job: Job, announce: Callable[[str], None]) -> RunLock:
    own = Holder.this_process(job)
    while not _create(path, own):
        found = _read(path)
        if found is None or not _is_dead(path, found, job, announce):
            continue  # it has been released, or has changed
        with _alone_over(path, found.holder.id, job) as may_replace:
            if may_replace:
                _replace(path, own)
                break
    return RunLock(path, own, job.flag)


def _is_dead(path: Path, found: _Seen, job: Job, announce: Callable[[str], None]) -> bool:
    """Whether the holder has died; False if the lock changed while it was watched. Raises FolderInUse if the holder lives."""
    holder = found.holder
    if holder.token in job.own_processes:
        raise FolderInUse(
            f"{job.flag} {path.parent} is one folder on this node and on that of {holder}; leave out --node-local-checkpoints, or give "
            f"each node a {job.flag} of its own"
        )
    is_earlier_start = bool(job.name) and holder.job == job.name and holder.restarts < job.restarts
    if is_earlier_start or (job.former_lock and holder.id == job.former_lock):
        return True
    verdict = is_dead(holder.token)
    if verdict is None:
        announce(
            f"{job.flag} {path.parent} was in use by {holder}, which cannot be looked at from here: waiting up to {SILENT_SECONDS:.0f} s "
            "for a sign that it lives"
        )
        verdict = _is_silent(path, found)
        if verdict is None:
            return False
    if not verdict:
        raise FolderInUse(
            f"{job.flag} {path.parent} is in use by {holder}; only one run at a time may save into a folder, so give another {job.flag}, "
            "or end that run first"
        )
    return verdict


def _is_silent(path: Path, found: _Seen) -> bool | None:
    """Whether the lock stays as it is for SILENT_SECONDS; False after a heartbeat; None if it is another lock meanwhile, or gone."""
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_SECONDS)
        now = _read(path)
        if now is None or now.holder != found.holder:
            return None
        if now.beat != found.beat:
            return False
    return True


@contextmanager
def _alone_over(path: Path, id: str, job: Job) -> Iterator[bool]:
    """Keeps all other processes from replacing or removing the lock `id` during the block. False if it is not in its place any more."""
    claim = _take_claim(path.with_name(f"{LOCK_FILE}.over-{id}"), job)
    try:
        found = _read(path)
        yield found is not None and found.holder.id == id
    finally:
        claim.path.unlink(missing_ok=True)


def _take_claim(path: Path, job: Job) -> RunLock:
    """Waits while a living process has the claim, which it needs for an instant only."""
    deadline = time.monotonic() + SILENT_SECONDS
    while True:
        try:
            return _take(path, job, lambda _: None)
        except FolderInUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(SHORT_SECONDS)


def _create(path: Path, holder: Holder) -> bool:
    """Gives a complete lock its name, in one step; False if the name is taken."""
    with _new_file(path, holder) as new:
        try:
            os.link(new, path, follow_symlinks=False)
        except FileNotFoundError:
            return False  # this is a claim to a lock that has been replaced, and `_clean_up` has deleted its new file
        except FileExistsError:
            return _links_of(new) == 2  # a repeated message of a network file system finds what the first has made
        except OSError as error:
            if error.errno not in NO_LINKS_HERE:
                raise
            return _create_without_links(path, holder)
    return True


def _links_of(path: Path) -> int:
    try:
        return path.stat().st_nlink
    except FileNotFoundError:
        return 0


def _create_without_links(path: Path, holder: Holder) -> bool:
    try:
        write_durably(path, _to_json(holder))
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)  # this process has created it, but for instance the disk is full
        raise
    return True


def _replace(path: Path, holder: Holder) -> None:
    with _new_file(path, holder) as new:
        new.rename(path)


@contextmanager
def _new_file(path: Path, holder: Holder) -> Iterator[Path]:
    new = path.with_name(f"{path.name}.new-{holder.token}")
    new.unlink(missing_ok=True)
    try:
        write_durably(new, _to_json(holder))
        yield new
    finally:
        new.unlink(missing_ok=True)


def _clean_up(path: Path, holder: Holder) -> None:
    """Deletes what processes left that died while they replaced a lock. A claim to a lock that has been replaced is of no use."""
    for left in path.parent.glob(f"{path.name}.*"):
        kind, _, name = left.name[len(path.name) + 1 :].partition("-")
        if (kind == "over" and not name.startswith(holder.id)) or (kind == "new" and is_abandoned(left, name)):
            left.unlink(missing_ok=True)


def _read(path: Path) -> _Seen | None:
    """The lock in its place, or None if there is none. Opening it anew makes a client of a network file system ask the server."""
    try:
        descriptor = open_regular(path, follows_links=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in NOT_A_FILE:
            raise
        raise CheckpointError(f"{path} is not a regular file, so no run made it; remove it") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        content = file.read(LARGEST_BYTES)
    return _Seen(_parse(content, path), (status.st_ino, status.st_mtime_ns, status.st_size))


def _to_json(holder: Holder) -> str:
    return json.dumps(asdict(holder))


def _parse(content: bytes, path: Path) -> Holder:
    """The holder that the bytes name; NOBODY if they are not the whole JSON of one, because it is still being written or is damaged."""
    try:
        found = OutsideFile(path, str(path)).members(content)
        found.require_only(asdict(NOBODY).keys())
        texts = {name: found.text(name) for name in ("id", "host", "token", "since", "job")}
        return Holder(process=found.count("process"), restarts=found.count("restarts"), **texts)
    except ValueError:
        return NOBODY
