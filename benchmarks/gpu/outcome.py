"""The outcome of one part of the GPU check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_DONE, CUT_SHORT, UNFINISHED = "passed", "failed", "not done", "cut short", "unfinished"


class NotDone(Exception):
    """Raised if this machine cannot do a part; the text says why."""


def nothing(outcome: Outcome) -> None:
    """Keeps nothing."""


@dataclass
class Outcome:
    """Lines for people, numbers for programs, and failed checks. A part without failed checks has passed.

    omissions: what this machine could not do, and why. late: what there was no time for. folder: for files that go with the report.
    keep: called with the outcome after every change, so that a part that is killed loses nothing that it has found.
    """

    lines: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    omissions: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    folder: Path = field(default_factory=Path)
    keep: Callable[[Outcome], None] = nothing

    def check(self, statement: str, *, holds: bool) -> bool:
        """Adds a line for the statement, and a failure if it does not hold. Returns whether it holds."""
        if not holds:
            self.failures.append(statement)
        self.say(f"{'holds' if holds else 'FAILS'}: {statement}")
        return holds

    def say(self, *lines: str) -> None:
        self.lines += lines
        self.keep(self)

    def measure(self, **measured: Any) -> None:
        self.measured |= measured
        self.keep(self)

    def omit(self, what: str) -> None:
        """Adds what this machine cannot do, with the reason."""
        self.omissions.append(what)
        self.keep(self)

    def ran_late(self, what: str) -> None:
        """Adds something that there was no time for."""
        self.late.append(what)
        self.keep(self)

    def end(self) -> str:
        """The status of a part that has come to its end."""
        return FAILED if self.failures else CUT_SHORT if self.late else PASSED

    def as_json(self, status: str) -> dict[str, Any]:
        return {
            "status": status,
            "lines": self.lines,
            "measured": self.measured,
            "failures": self.failures,
            "omissions": self.omissions,
            "late": self.late,
        }


def report(status: str, lines: list[str]) -> dict[str, Any]:
    """The JSON of a part that has no outcome of its own. Its first line is the failure, the omission, or what there was no time for."""
    of_status = {FAILED: "failures", NOT_DONE: "omissions", CUT_SHORT: "late"}
    return {**Outcome(lines).as_json(status), of_status[status]: lines[:1]}
