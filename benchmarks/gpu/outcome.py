"""The outcome of one part of the GPU check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class NotDone(Exception):
    """Raised if this machine cannot do a part; the text says why."""


@dataclass
class Outcome:
    """Lines for people, numbers for programs, and failed checks. A part without failed checks has passed."""

    lines: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    omissions: list[str] = field(default_factory=list)  # what this machine could not do, and why

    def check(self, statement: str, *, holds: bool) -> None:
        """Adds a line for the statement, and a failure if it does not hold."""
        self.lines.append(f"{'holds' if holds else 'FAILS'}: {statement}")
        if not holds:
            self.failures.append(statement)

    def as_json(self) -> dict[str, Any]:
        status = "failed" if self.failures else "passed"
        return {
            "status": status,
            "lines": self.lines,
            "measured": self.measured,
            "failures": self.failures,
            "omissions": self.omissions,
        }


def gpu_or_not_done() -> None:
    """Raises NotDone if torch finds no GPU."""
    import torch

    if not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        raise NotDone(f"torch finds no GPU here (torch {torch.__version__} is built for {built_for})")
