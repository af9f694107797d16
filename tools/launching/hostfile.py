"""Reads hosts and their slots from a file of `host slots=N` lines, and selects some of them by --include and --exclude."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_zpp.config.flag import whole_number
from megatron_zpp.system.outside import OutsideFile
from megatron_zpp.system.user_error import UserError

LARGEST_SLOTS = 4096  # of one host; no machine has as many GPUs or cores
LINE = re.compile(r"(\S+)\s+slots=(\d+)")
NAME = re.compile(r"[A-Za-z0-9_][\w.:-]*", re.ASCII)  # a name that begins with - would be an option of ssh


@dataclass(frozen=True)
class Host:
    """A machine. slots: its used slots (GPUs, or ranks on the CPU), ascending. all_slots: how many slots it has.

    gpus: what CUDA_VISIBLE_DEVICES calls its slots; empty for their numbers.
    """

    name: str
    slots: tuple[int, ...]
    all_slots: int
    gpus: tuple[str, ...] = ()

    @property
    def visible_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES for the used slots."""
        return ",".join(self.gpus[slot] if self.gpus else str(slot) for slot in self.slots)

    @property
    def has_first_slots(self) -> bool:
        """Whether the slots are 0, 1, ..., so that CUDA_VISIBLE_DEVICES need not be set."""
        return self.slots == tuple(range(len(self.slots)))


def read_hostfile(path: Path) -> list[Host]:
    """The hosts in the order of the file. Blank lines, and text after #, are ignored. Raises UserError, naming file and line."""
    hosts: dict[str, Host] = {}
    text_of_file = OutsideFile(path, f"--hostfile {path}", "write one host per line, as: name slots=8.").text()
    for number, line in enumerate(text_of_file.splitlines(), start=1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        found = LINE.fullmatch(text)
        if found is None:
            raise UserError(f"{path}, line {number}: {text!r} is not a host; write it as: name slots=8.")
        name, slots = found[1], whole_number(found[2])
        _check_name(name, f"{path}, line {number}")
        if slots == 0:
            raise UserError(f"{path}, line {number}: {name} has no slots; give it one, or put # before the line.")
        if slots is None or slots > LARGEST_SLOTS:
            raise UserError(f"{path}, line {number}: {name} has slots={found[2]}; write a whole number from 1 to {LARGEST_SLOTS}.")
        if name in hosts:
            raise UserError(f"{path}, line {number}: {name} is in the file twice; keep one of the lines.")
        hosts[name] = Host(name, tuple(range(slots)), slots)
    if not hosts:
        raise UserError(f"{path} names no host; write one per line, as: name slots=8.")
    return list(hosts.values())


def _check_name(name: str, where: str) -> None:
    if "@" in name:
        user, _, host = name.partition("@")
        raise UserError(f"{where}: {name} names a user, but ranks meet at a host; write {host}, and User {user} for it in ~/.ssh/config.")
    if not NAME.fullmatch(name):
        raise UserError(f"{where}: {name!r} is not a host name; begin with a letter, a digit or _, and continue with these and . : -.")


def include(hosts: list[Host], words: str) -> list[Host]:
    """The hosts and slots named by words such as `a:0,2@b` (all slots of b), in the order of the hosts."""
    wanted = _parsed("--include", hosts, words)
    return [replace(host, slots=wanted[host.name]) for host in hosts if host.name in wanted]


def exclude(hosts: list[Host], words: str) -> list[Host]:
    """The hosts without the slots named by words such as `a:0,2@b` (all slots of b). Raises UserError if no slot is left."""
    unwanted = _parsed("--exclude", hosts, words)
    left = [replace(host, slots=tuple(slot for slot in host.slots if slot not in unwanted.get(host.name, ()))) for host in hosts]
    if not any(host.slots for host in left):
        raise UserError(f"--exclude {words} leaves no slot; exclude fewer.")
    return [host for host in left if host.slots]


def check_same_slots(hosts: list[Host]) -> int:
    """The number of slots of each host. Raises UserError if the numbers differ, because all nodes must have the same size."""
    counts: Mapping[str, int] = {host.name: len(host.slots) for host in hosts}
    fewest = min(counts.values())
    if len(set(counts.values())) > 1:
        named = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise UserError(f"hosts must have equal numbers of slots, {named}; give --num_gpus {fewest}, or choose with --include.")
    return fewest


def _parsed(flag: str, hosts: list[Host], words: str) -> dict[str, tuple[int, ...]]:
    known = {host.name: host for host in hosts}
    chosen: dict[str, tuple[int, ...]] = {}
    for word in words.split("@"):
        name, colon, numbers = word.strip().partition(":")
        if name not in known:
            raise UserError(f"{flag} {words}: {name!r} is not among the hosts, which are {', '.join(known)}.")
        if name in chosen:
            raise UserError(f"{flag} {words}: {name} is named twice; list its slots after one colon, as {name}:0,1.")
        chosen[name] = _slots(flag, words, known[name], numbers) if colon else known[name].slots
    return chosen


def _slots(flag: str, words: str, host: Host, numbers: str) -> tuple[int, ...]:
    named = [whole_number(number) for number in numbers.split(",")]
    if None in named:
        raise UserError(f"{flag} {words}: {numbers!r} is not a list of slots; write them as {host.name}:0,1.")
    slots = sorted({number for number in named if number is not None})
    if slots[-1] >= host.all_slots:
        raise UserError(f"{flag} {words}: {host.name} has no slot {slots[-1]}, its slots are 0 to {host.all_slots - 1}.")
    return tuple(slots)
