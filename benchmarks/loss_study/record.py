"""The file of outcomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.loss_study.training import Outcome
from benchmarks.report import ORIGIN, origin_with, write


class Record:
    """The outcomes of a study, stored after every run.

    subject: what all runs have in common. Raises ValueError if the file holds runs with another subject. origin: of the runs to add.
    """

    def __init__(self, path: Path, subject: Mapping[str, object], origin: Mapping[str, object]) -> None:
        self._path = path
        self._subject = dict(subject)
        self._origin = dict(origin)
        self.outcomes: list[Outcome] = []
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            self.outcomes = [Outcome(**outcome) for outcome in stored.pop("outcomes")]
            self._origin = origin_with(stored, origin)
            stored = {name: value for name, value in stored.items() if name not in ORIGIN}
            other = [name for name in {**stored, **self._subject} if stored.get(name) != self._subject.get(name)]
            if other:
                raise ValueError(f"{path} holds runs with another {' and '.join(sorted(other))}; give another --output or remove it.")

    def has(self, setting: str, seed: int) -> bool:
        return any((outcome.setting, outcome.seed) == (setting, seed) for outcome in self.outcomes)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        write(self._path, {**self._origin, **self._subject, "outcomes": [asdict(outcome) for outcome in self.outcomes]})
