"""The history of one run, from the file that --log-jsonl of the training wrote, and what the run has cost up to each line of it."""

from __future__ import annotations

import math
import operator
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from pathlib import Path
from typing import Any

from megatron_zpp.config.counted import counted
from megatron_zpp.system.outside import Members, OutsideFile
from megatron_zpp.system.user_error import UserError

REMEDY = "give a file that --log-jsonl of pretrain_zeropp_gpt.py wrote."
LOSS = "lm_loss"
FIGURES = (
    "consumed_samples",
    "consumed_tokens",
    "context_link_bytes",
    "elapsed_ms_per_iteration",
    "eta_seconds",
    "final_evaluations",
    "inter_node_bytes",
    "inter_node_bytes_per_iteration",
    "intra_node_bytes",
    "model_state_bytes",
    "model_tflops_per_gpu",
    "skipped_iterations",
    "tensor_link_bytes",
    "tokens_per_second",
)
READERS: dict[str, Callable[[Members, str], float]] = {
    "interval_iterations": Members.positive_count,
    "learning_rate": Members.number_or_nan,
    "train_iters": Members.positive_count,
    **dict.fromkeys(FIGURES, Members.number),
}


@dataclass(frozen=True)
class Axis:
    """A measure of a run's progress. key: of the log; empty for the iteration itself. is_mean: whether it is logged per iteration."""

    label: str
    key: str = ""
    is_mean: bool = False
    scale: float = 1.0


AXES = {
    "iteration": Axis("iteration"),
    "samples": Axis("samples", "consumed_samples"),
    "tokens": Axis("tokens", "consumed_tokens"),
    "seconds": Axis("seconds of training steps", "elapsed_ms_per_iteration", is_mean=True, scale=1e-3),
    "bytes": Axis("bytes into one node from others", "inter_node_bytes_per_iteration", is_mean=True),
}


class RunHistory:
    """The training lines and validations of one run, ascending by iteration.

    A line whose steps have been logged before comes from a resumed run. It replaces the lines of these steps and all later ones, so time
    and bytes are those of the steps that made the model; steps that were done again count once. It replaces the validations after these
    steps, too, except those that the resumed run has logged before its line. A validation replaces only the one of its set and iteration,
    because --skip-train evaluates an earlier checkpoint without training on from it.
    iterations: of the lines.
    validations: iterations and losses of each validation set; its name is empty if there is only one.
    evaluated: the iterations of the validations and tests that the log has since the last line.
    replaced_lines, repetitions: how many lines were replaced, and by how many that repeat steps.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.iterations: array[int] = array("q")
        self.validations: dict[str, list[tuple[int, float]]] = {}
        self.evaluated: list[int] = []
        self.replaced_lines = 0
        self.repetitions = 0
        self._losses = array("d")
        self._columns = {key: array("d") for key in READERS}  # NaN where a line lacks the key
        self._is_logged = {key: bytearray() for key in READERS}  # 0 where a line lacks the key, since NaN may also be logged
        self._start: int | None = None  # the iteration after which the log begins
        self._after_line: set[tuple[str, int]] = set()  # validations since the last line, except those that belong to it

    def add(self, record: Members) -> None:
        """Adds an object of the log. Raises UserError for a value of the wrong kind, and is unchanged then."""
        iteration = record.count("iteration")
        if LOSS in record:
            loss = record.number_or_nan(LOSS)
            self._add_line(iteration, loss, {key: read(record, key) for key, read in READERS.items() if key in record})
        elif "validation_loss" in record:
            loss = record.number_or_nan("validation_loss")
            name = record.text("validation_set") if "validation_set" in record else ""
            self._add_validation(name, iteration, loss)
            self.evaluated.append(iteration)
        elif "test_loss" in record:
            self.evaluated.append(iteration)

    def _add_validation(self, name: str, iteration: int, loss: float) -> None:
        points = self.validations.setdefault(name, [])
        first, end = _index_from(points, iteration), _index_from(points, iteration + 1)
        belongs_to_line = first == end and bool(self.iterations) and self.iterations[-1] == iteration
        if not belongs_to_line:
            self._after_line.add((name, iteration))
        points[first:end] = [(iteration, loss)]

    def _add_line(self, iteration: int, loss: float, figures: Mapping[str, float]) -> None:
        interval = figures.get("interval_iterations")
        before = iteration - (1 if interval is None else int(interval))
        self._cut(before, iteration)
        if not self.iterations:
            start = 0 if interval is None else max(0, before)
            self._start = start if self._start is None else min(start, self._start)
        self.iterations.append(iteration)
        self._losses.append(loss)
        for key, column in self._columns.items():
            column.append(figures.get(key, math.nan))
            self._is_logged[key].append(key in figures)
        self._after_line.clear()
        self.evaluated.clear()

    def _cut(self, before: int, iteration: int) -> None:
        """Removes what a line of `iteration` replaces, whose steps come after the iteration `before`.

        Without a line to replace, a validation of the same iteration stays. It comes before its line if --iterations-to-skip left out the
        iterations between.
        """
        replaced = len(self.iterations) - bisect_left(self.iterations, before + 1)
        if replaced:
            self.repetitions += 1
            self.replaced_lines += replaced
            del self.iterations[-replaced:]
            columns: Sequence[MutableSequence[Any]] = (self._losses, *self._columns.values(), *self._is_logged.values())
            for column in columns:
                del column[-replaced:]
        last_kept = iteration - 1 if replaced else iteration
        for name, points in self.validations.items():
            first = _index_from(points, before + 1)
            points[first:] = [point for point in points[first:] if point[0] <= last_kept and (name, point[0]) in self._after_line]

    def curve(self, key: str) -> dict[int, float]:
        """The figure `key` by iteration, of the lines that have it."""
        return dict(compress(zip(self.iterations, self._columns[key], strict=True), self._is_logged[key]))

    def losses(self) -> dict[int, float]:
        """The training loss by iteration; it may be NaN or infinite."""
        return dict(zip(self.iterations, self._losses, strict=True))

    @property
    def all_losses(self) -> Sequence[float]:
        """The training loss of each line."""
        return self._losses

    @property
    def last_loss(self) -> float:
        """The training loss of the last line, of which there must be one."""
        return self._losses[-1]

    def figures(self, key: str) -> Sequence[float]:
        """The figure `key` of each line, NaN where a line lacks it."""
        return self._columns[key]

    def total(self, key: str) -> float:
        """The sum of the figure `key` over the lines that have it."""
        return sum(compress(self._columns[key], self._is_logged[key]))

    def latest(self, key: str) -> float | None:
        """The figure `key` of the last line; None if the line lacks it, or there is none."""
        return self._columns[key][-1] if self.iterations and self._is_logged[key][-1] else None

    def require(self, *keys: str, remedy: str) -> None:
        """Raises UserError if a line lacks one of the keys."""
        for key in keys:
            if not all(self._is_logged[key]):
                raise UserError(f"{self.name} lacks {key} in a training line; {remedy}")

    def positions(self, axis: Axis) -> list[float]:
        """Where each line stands on the axis. Raises UserError if a line lacks a key of the log that the axis needs.

        Time and bytes are added up: a line stands for all iterations since the line before, the first one for its own interval.
        """
        if not axis.key:
            return list(map(float, self.iterations))
        keys = (axis.key, "interval_iterations") if axis.is_mean else (axis.key,)
        self.require(*keys, remedy="older versions did not log it; choose another axis, or train again.")
        if not axis.is_mean:
            return self._columns[axis.key].tolist()
        steps = map(operator.sub, self.iterations, [self.start, *self.iterations[:-1]])
        return list(accumulate(count * mean * axis.scale for count, mean in zip(steps, self._columns[axis.key], strict=True)))

    def place(self, iteration: int, positions: Sequence[float], axis: Axis) -> float:
        """Where an iteration stands on the axis, between the lines around it. positions: of the lines."""
        if not axis.key:
            return float(iteration)
        index = bisect_left(self.iterations, iteration)
        if index == len(self.iterations):
            return positions[-1]
        start = self.start if axis.is_mean else 0
        before, position = (self.iterations[index - 1], positions[index - 1]) if index else (start, 0.0)
        share = (iteration - before) / max(1, self.iterations[index] - before)
        return position + max(0.0, share) * (positions[index] - position)

    @property
    def start(self) -> int:
        """The iteration after which the log begins: 0 unless that was with a resumed run."""
        return self._start or 0

    def unlogged_iterations(self) -> int:
        """Iterations before the last line that belong to no line: a job ended before it logged them, or they were left out."""
        found, before = 0, self.start
        for iteration, interval in zip(self.iterations, self._columns["interval_iterations"], strict=True):
            if not math.isnan(interval):
                found += max(0, iteration - before - int(interval))
            before = iteration
        return found

    def notes(self, *, of_sums: bool = True) -> list[str]:
        """Sentences about lines that are not shown. of_sums: also what the sums of time and bytes lack or estimate."""
        found = []
        if self.repetitions:
            repeated = f"later jobs repeat logged steps ({counted(self.repetitions, 'time')})"
            replaced = f"which replaces {counted(self.replaced_lines, 'line')}"
            found.append(f"{self.name}: {repeated}, {replaced}; jobs that train at the same time need a log each")
        if not of_sums:
            return found
        if self.start > 0:
            found.append(f"{self.name}: the log begins with iteration {self.start + 1}; time and bytes before it are not counted")
        if unlogged := self.unlogged_iterations():
            found.append(
                f"{self.name}: {counted(unlogged, 'iteration is', 'iterations are')} in no line of the log, and counted as in the next line"
            )
        return found

    def first_at(self, loss: float) -> int | None:
        """The index of the first line whose training loss is at most `loss`."""
        return next((index for index, found in enumerate(self._losses) if found <= loss), None)


def _index_from(points: Sequence[tuple[int, float]], iteration: int) -> int:
    """The index of the first point from this iteration on."""
    return bisect_left(points, iteration, key=lambda point: point[0])


def read_history(path: Path, name: str) -> RunHistory:
    """The history in a file. Tells of lines that a killed run did not finish and leaves them out.

    Raises UserError for a file without a training line.
    """
    history = RunHistory(name)
    left_out: list[int] = []
    for record in OutsideFile(path, str(path), REMEDY).lines_of_members(left_out.append):
        history.add(record)
    if not history.iterations:
        raise UserError(f"{path} holds no training iteration; {REMEDY}")
    if left_out:
        more = f" with {counted(len(left_out) - 1, 'later line')}" if len(left_out) > 1 else ""
        print(f"{path}, line {left_out[0]}: unfinished, left out{more}", file=sys.stderr)
    return history


def read_histories(paths: Sequence[str], names: Sequence[str] | None) -> list[RunHistory]:
    """The history of each file. names: of the runs; None for distinct parts of the paths. Raises UserError for a wrong number of names."""
    return [read_history(Path(path), name) for path, name in zip(paths, run_names(paths, names), strict=True)]


def run_names(paths: Sequence[str], names: Sequence[str] | None) -> list[str]:
    """The names as given, or a distinct one for each path, made of as few of its last parts as possible."""
    if names is not None:
        if len(names) != len(paths):
            raise UserError(
                f"--names has {counted(len(names), 'name')} for {counted(len(paths), 'file')} of --log-jsonl; give one for each."
            )
        return list(names)
    parts = [(*Path(path).parent.parts, Path(path).stem) for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(path[-count:]) for path in parts]
        if len(set(found)) == len(found):
            return found
    return list(paths)
