"""Reports of parts as text for people: whole for the file, and cut for what is printed at the end (no torch)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

Reports = dict[str, dict[str, Any]]

MOST_PRINTED = 10_000  # characters; with the lines of progress less than 12,000, of which some machines show no more
MOST_OF_FAILURES, MOST_OF_REASONS = 4_500, 1_200  # of them
MOST_FAILURES, MOST_LINES = 10, 80  # of a part
LONGEST_LINE = 300
CHECKED = ("holds: ", "FAILS: ")  # before a statement; those that fail are failures as well


def part_lines(name: str, found: dict[str, Any]) -> list[str]:
    """Everything about a part."""
    return [status_line(name, found), *found["lines"], *_reasons(name, found)]


def summary_lines(reports: Reports) -> list[str]:
    """A line per part, then every failure, and everything that was not done, with its reason."""
    lines = [f"{name}: {found['status']} ({found['seconds']} s)" for name, found in reports.items()]
    lines += [f"FAILED, {name}: {failure}" for name, found in reports.items() for failure in found["failures"]]
    return lines + reasons(reports)


def status_line(name: str, found: dict[str, Any]) -> str:
    return f"== {name}: {found['status']} ({found['seconds']} s)"


def printed(reports: Reports, file: str) -> str:
    """At most MOST_PRINTED characters: findings, what was not done, failures, and last a line per part. file: where everything is."""
    statuses = [status_line(name, found) for name, found in reports.items()]
    failures = {name: [f"FAILED, {name}: {_line(failure)}" for failure in _varied(found["failures"])] for name, found in reports.items()}
    undone = {name: [_line(reason) for reason in _reasons(name, found)] for name, found in reports.items()}
    last = [*_cut(undone, MOST_OF_REASONS, MOST_FAILURES), *_cut(failures, MOST_OF_FAILURES, MOST_FAILURES), *statuses]
    last.append(f"everything is in {file}")
    findings = {name: [f"{name}: {line}" for line in found["lines"] if not line.startswith(CHECKED)] for name, found in reports.items()}
    return "\n".join([*_cut(findings, MOST_PRINTED - _characters(last), MOST_LINES), *last])


def reasons(reports: Reports) -> list[str]:
    """What was not done, and why."""
    return [line for name, found in reports.items() for line in _reasons(name, found)]


def _reasons(name: str, found: dict[str, Any]) -> list[str]:
    return [f"could not do, {name}: {why}" for why in found["omissions"]] + [f"no time for, {name}: {why}" for why in found["late"]]


def _cut(groups: dict[str, list[str]], characters: int, most_lines: int) -> list[str]:
    """The lines of all groups, in at most so many characters. What does not fit is left out at the ends of the longest groups."""
    kept = {name: [line[:LONGEST_LINE] for line in lines[:most_lines]] for name, lines in groups.items()}

    def lines() -> list[str]:
        left_out = {name: len(groups[name]) - len(some) for name, some in kept.items()}
        return [line for name, some in kept.items() for line in [*some, *([f"{left_out[name]} more of {name}"] if left_out[name] else [])]]

    while _characters(lines()) > characters and any(kept.values()):
        max(kept.values(), key=_characters).pop()
    return lines()


def _varied(failures: Sequence[str]) -> list[str]:
    """First one failure of each subject, such as a kernel, which is what stands before a comma; then the second of each."""
    earlier = Counter[str]()
    turns = []
    for failure in failures:
        subject = failure.partition(",")[0]
        turns.append(earlier[subject])
        earlier[subject] += 1
    return [failure for _, failure in sorted(zip(turns, failures, strict=True), key=lambda pair: pair[0])]


def _line(text: str) -> str:
    """An error may have several lines."""
    return " ".join(text.split())


def _characters(lines: Sequence[str]) -> int:
    return sum(len(line) + 1 for line in lines)
