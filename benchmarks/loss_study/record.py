"""The file of outcomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from loss_study.training import Outcome


class Record:
    """The outcomes of a study, stored after every run.

    subject: what all runs have in common. Raises ValueError if the file holds runs with another subject.
    """

    def __init__(self, path: Path, subject: Mapping[str, object]) -> None:
        self._path = path
        self._subject = dict(subject)
        self.outcomes: list[Outcome] = []
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            self.outcomes = [Outcome(**outcome) for outcome in stored.pop("outcomes")]
            other = [name for name in {**stored, **self._subject} if stored.get(name) != self._subject.get(name)]
            if other:
                raise ValueError(f"{path} holds runs with another {' and '.join(sorted(other))}; give another --output or remove it.")

    def has(self, setting: str, seed: int) -> bool:
        return any((outcome.setting, outcome.seed) == (setting, seed) for outcome in self.outcomes)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        stored = {**self._subject, "outcomes": [asdict(outcome) for outcome in self.outcomes]}
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._path)
