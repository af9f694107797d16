"""A process that joins a run, as the others read it from the store: what it says of itself, checked."""

from __future__ import annotations

import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_zpp.parallel.job_ids import JobIds
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.system.user_error import UserError

LARGEST_BYTES = 1 << 13
MOST_CHARACTERS, MOST_IDS = 300, 10


class ForeignEntry(UserError):
    """The store holds something that no run of this program has written."""


@dataclass(frozen=True)
class Member:
    """A rank that has joined or wants to. job: tells its job from others. since: when it began to join, by the clock of its host.

    token: different for every attempt to join, because processes in containers may have the same host and number.
    """

    rank: int
    world_size: int
    job: JobIds
    host: str
    process: int
    since: str
    token: str

    @classmethod
    def this_process(cls, launch: Launch) -> Member:
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        return cls(launch.rank, launch.world_size, launch.job, socket.gethostname()[:MOST_CHARACTERS], os.getpid(), now, uuid.uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} (since {self.since}, {self.job})"


@dataclass(frozen=True)
class Invitation:
    """What rank 0 tells the others. part: the name of this start's part of the store."""

    part: str
    rank_0: Member


def encoded(entry: Member | Invitation) -> str:
    """JSON in ASCII, which a store keeps as it is."""
    return json.dumps(asdict(entry))


def decoded_member(content: bytes) -> Member:
    """The member. Raises ForeignEntry if the content is not one."""
    return _member(_values(content))


def decoded_invitation(content: bytes) -> Invitation:
    """The invitation. Raises ForeignEntry if the content is not one."""
    values = _values(content)
    return Invitation(_text(values, "part"), _member(values.members("rank_0")))


def _values(content: bytes) -> Members:
    entry = OutsideFile(Path(), "the store of the ranks", error=ForeignEntry)
    if len(content) > LARGEST_BYTES:
        entry.refuse(f"has an entry of {len(content)} bytes, at most {LARGEST_BYTES} are allowed")
    return entry.members(content)


def _member(values: Members) -> Member:
    job = values.members("job")
    pairs = job.list("ids")
    if len(pairs) > MOST_IDS or not all(_is_pair(pair) for pair in pairs):
        job.refuse("ids", f"at most {MOST_IDS} pairs of strings")
    return Member(
        rank=values.count("rank"),
        world_size=values.positive_count("world_size"),
        job=JobIds(_text(job, "launcher"), tuple((name, value) for name, value in pairs)),
        host=_text(values, "host"),
        process=values.count("process"),
        since=_text(values, "since"),
        token=_text(values, "token"),
    )


def _text(values: Members, key: str) -> str:
    text = values.text(key)
    if not _is_short(text):
        values.refuse(key, f"a string of at most {MOST_CHARACTERS} characters that can be printed")
    return text


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) and _is_short(text) for text in pair)


def _is_short(text: str) -> bool:
    return len(text) <= MOST_CHARACTERS and text.isprintable()
