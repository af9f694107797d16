"""Stores the finished rounds in a JSON file, so that an interrupted measurement can continue."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import ORIGIN, origin_with, write
from testbed.rates import Rate


class Record:
    """Rounds by rate, each with one measurement per configuration.

    subject: settings that must be equal for rounds to be comparable. Raises ValueError if the file has another subject.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any], *, starts_anew: bool) -> None:
        self._path = path
        plain_subject = json.loads(json.dumps(subject))
        self.content: dict[str, Any] = {"subject": plain_subject, "notes": {}, "rates": {}}
        if not path.exists() or starts_anew:
            return
        found = json.loads(path.read_text())
        differing = [name for name, value in plain_subject.items() if found["subject"].get(name) != value]
        if differing:
            pairs = "; ".join(f"{name} {found['subject'].get(name)} there and {plain_subject[name]} here" for name in differing)
            raise ValueError(f"--output {path} holds another measurement ({pairs}); choose another file, or --fresh to start anew.")
        self.content = found

    @property
    def rates(self) -> list[Rate]:
        """The rates that have at least one round, the fastest first."""
        return sorted(map(Rate.parse, self.content["rates"]), reverse=True)

    def rounds(self, rate: Rate) -> list[dict[str, Any]]:
        """Finished rounds: by configuration, a measurement as JSON."""
        rounds: list[dict[str, Any]] = self.content["rates"].get(str(rate), [])
        return rounds

    def check_configurations(self, names: Collection[str]) -> None:
        """Raises ValueError if a finished round has other configurations than `names`: medians would not be side by side."""
        for rounds in self.content["rates"].values():
            for finished in rounds:
                if finished.keys() != set(names):
                    raise ValueError(
                        f"--output {self._path} holds rounds of {', '.join(finished)}, and {', '.join(names)} are to be measured; choose "
                        "another file, or --fresh to start anew."
                    )

    def add_round(self, rate: Rate, measured: Mapping[str, Mapping[str, Any]]) -> None:
        self.content["rates"].setdefault(str(rate), []).append(dict(measured))
        self._write()

    def made_by(self, origin: Mapping[str, Any]) -> None:
        """Stores command, machine, versions and date; rounds of earlier commands keep theirs."""
        self.content = {**origin_with(self.content, origin), **{name: own for name, own in self.content.items() if name not in ORIGIN}}
        self._write()

    def note(self, name: str, value: Any) -> None:
        """Stores a fact beside the rounds."""
        self.content["notes"][name] = value
        self._write()

    def _write(self) -> None:
        write(self._path, self.content)
