"""The file of the study: curves of loss, and seconds of a step at each rate of the link."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import ORIGIN, origin_with, write
from testbed.rates import Rate


@dataclass(frozen=True)
class Curve:
    """One run. steps, losses, seconds: at every evaluation, of which the first precedes the first step.

    losses: mean loss of the held-out samples, nats per byte. seconds: of training alone, at `rate`.
    """

    setting: str
    learning_rate: float
    rate: str
    steps: list[int]
    losses: list[float]
    seconds: list[float]


class Record:
    """What has been measured, stored after every run.

    subject: what all runs have in common. Raises ValueError if the file holds runs with another subject. origin: of what is added.
    timed: by rate and name, the seconds of a step in each round.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
        self._path = path
        self.subject = json.loads(json.dumps(subject))
        self.origin = dict(origin)
        self.curves: list[Curve] = []
        self.timed: dict[str, dict[str, list[float]]] = {}
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            other = [name for name, value in self.subject.items() if stored["subject"].get(name) != value]
            if other:
                raise ValueError(f"{path} holds runs with another {' and '.join(other)}; give another --output or remove it.")
            self._take(stored)
            self.origin = origin_with(stored, origin)

    @classmethod
    def stored(cls, path: Path) -> Record:
        """What the file at `path` holds."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, stored["subject"], {name: stored[name] for name in ORIGIN})

    def _take(self, stored: Mapping[str, Any]) -> None:
        self.curves = [Curve(**curve) for curve in stored["curves"]]
        self.timed = stored["step_seconds"]

    def has_curve(self, setting: str, learning_rate: float, rate: Rate, last: int) -> bool:
        """Whether a run with these has been made up to step `last`."""
        return any(
            (curve.setting, curve.learning_rate, curve.rate) == (setting, learning_rate, str(rate)) and curve.steps[-1] >= last
            for curve in self.curves
        )

    def best_curve(self, setting: str) -> Curve:
        """The run without a limit that ends with the least loss. Raises ValueError if there is none."""
        curves = [curve for curve in self.curves if curve.setting == setting and not Rate.parse(curve.rate).is_limited]
        if not curves:
            raise ValueError(f"{self._path} has no curve of {setting}; measure its losses first.")
        return min(curves, key=lambda curve: curve.losses[-1])

    def add_curve(self, curve: Curve) -> None:
        self.curves.append(curve)
        self._write()

    @property
    def step_seconds(self) -> dict[str, dict[str, float]]:
        """By rate and name, the seconds of a step: the least that was measured, because nothing makes a step faster than it is."""
        return {rate: {name: min(seconds) for name, seconds in of_rate.items()} for rate, of_rate in self.timed.items()}

    def rounds(self, rate: Rate, name: str) -> int:
        """How often steps of `name` have been timed at a rate."""
        return len(self.timed.get(str(rate), {}).get(name, []))

    def add_seconds(self, rate: Rate, name: str, seconds: float) -> None:
        """Stores the seconds of a step of `name` at a rate, of one round."""
        self.timed.setdefault(str(rate), {}).setdefault(name, []).append(seconds)
        self._write()

    def _write(self) -> None:
        curves = [asdict(curve) for curve in self.curves]
        write(self._path, {**self.origin, "subject": self.subject, "step_seconds": self.timed, "curves": curves})
