"""The history of one run, from the file that --log-jsonl of the training wrote, and what the run has cost up to each line of it."""

import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.config.outside import LOG_BYTES, Members, OutsideFile

REMEDY = "give a file that --log-jsonl of pretrain_zeropp_gpt.py wrote."
COUNTS = ("interval_iterations", "train_iters")
RATES = ("learning_rate",)  # may be NaN
FIGURES = (
    "consumed_samples",
    "consumed_tokens",
    "context_link_bytes",
    "elapsed_ms_per_iteration",
    "eta_seconds",
    "inter_node_bytes",
    "inter_node_bytes_per_iteration",
    "intra_node_bytes",
    "model_state_bytes",
    "model_tflops_per_gpu",
    "skipped_iterations",
    "tensor_link_bytes",
    "tokens_per_second",
)


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


@dataclass(frozen=True)
class TrainingLine:
    """The logged values of one training line. figures: those of COUNTS, RATES and FIGURES that the line has."""

    iteration: int
    loss: float  # may be NaN or infinite
    figures: Mapping[str, float]


class RunHistory:
    """The training lines and validations of one run, ascending by iteration.

    A line of an iteration that was passed before comes from a resumed run. It replaces all that was logged from there on, so time and bytes
    are those of the steps that made the model; steps that were done again count once.
    validations: iterations and losses of each validation set; its name is empty if there is only one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[TrainingLine] = []
        self.validations: dict[str, list[tuple[int, float]]] = {}
        self._start: int | None = None  # the iteration after which the log begins

    def add(self, record: Members) -> None:
        """Adds an object of the log. Raises ValueError for a value of the wrong kind, and is unchanged then."""
        iteration = record.count("iteration")
        if "lm_loss" in record:
            line = TrainingLine(iteration, record.number_or_nan("lm_loss"), _figures(record))
            self._cut(iteration)
            if not self.lines:
                start = max(0, iteration - int(line.figures.get("interval_iterations", iteration)))
                self._start = start if self._start is None else min(start, self._start)
            self.lines.append(line)
        elif "validation_loss" in record:
            loss = record.number_or_nan("validation_loss")
            name = record.text("validation_set") if "validation_set" in record else ""
            self._cut(iteration + 1)
            points = self.validations.setdefault(name, [])
            if points and points[-1][0] == iteration:
                points.pop()
            points.append((iteration, loss))

    def _cut(self, first: int) -> None:
        """Removes lines and validations from this iteration on."""
        if self.lines and self.lines[-1].iteration >= first:
            del self.lines[bisect_left(self.lines, first, key=lambda line: line.iteration) :]
        for points in self.validations.values():
            if points and points[-1][0] >= first:
                del points[bisect_left(points, first, key=lambda point: point[0]) :]

    def curve(self, key: str) -> dict[int, float]:
        """The figure `key` by iteration, of the lines that have it."""
        return {line.iteration: line.figures[key] for line in self.lines if key in line.figures}

    def losses(self) -> dict[int, float]:
        """The training loss by iteration."""
        return {line.iteration: line.loss for line in self.lines}

    def positions(self, axis: Axis) -> list[float]:
        """Where each line stands on the axis. Raises ValueError if a line lacks a key of the log that the axis needs.

        Time and bytes are added up: a line stands for all iterations since the line before, the first one for its own interval.
        """
        if not axis.key:
            return [float(line.iteration) for line in self.lines]
        for key in (axis.key, "interval_iterations") if axis.is_mean else (axis.key,):
            if any(key not in line.figures for line in self.lines):
                raise ValueError(f"{self.name} lacks {key}, which older versions did not log; choose another axis, or train again.")
        if not axis.is_mean:
            return [line.figures[axis.key] for line in self.lines]
        found, before, total = [], self.start, 0.0
        for line in self.lines:
            total += (line.iteration - before) * line.figures[axis.key] * axis.scale
            before = line.iteration
            found.append(total)
        return found

    def place(self, iteration: int, positions: Sequence[float], axis: Axis) -> float:
        """Where an iteration stands on the axis, between the lines around it. positions: of the lines."""
        if not axis.key:
            return float(iteration)
        index = bisect_left(self.lines, iteration, key=lambda line: line.iteration)
        if index == len(self.lines):
            return positions[-1]
        start = self.start if axis.is_mean else 0
        before, position = (self.lines[index - 1].iteration, positions[index - 1]) if index else (start, 0.0)
        share = (iteration - before) / max(1, self.lines[index].iteration - before)
        return position + max(0.0, share) * (positions[index] - position)

    @property
    def start(self) -> int:
        """The iteration after which the log begins: 0 unless that was with a resumed run."""
        return self._start or 0

    def unlogged_iterations(self) -> int:
        """Iterations before the last line that belong to no line: a job ended before it logged them, or they were left out."""
        found, before = 0, self.start
        for line in self.lines:
            iterations = line.iteration - before
            found += max(0, iterations - int(line.figures.get("interval_iterations", iterations)))
            before = line.iteration
        return found

    def notes(self) -> list[str]:
        """Sentences about what the sums of time and bytes lack or estimate."""
        found = []
        if self.start > 0:
            found.append(f"{self.name}: the log begins with iteration {self.start + 1}; time and bytes before it are not counted")
        if unlogged := self.unlogged_iterations():
            found.append(f"{self.name}: {unlogged} iterations are in no line of the log; they count like those of the next line")
        return found

    def first_at(self, loss: float) -> int | None:
        """The index of the first line whose training loss is at most `loss`."""
        return next((index for index, line in enumerate(self.lines) if line.loss <= loss), None)


def _figures(record: Members) -> dict[str, float]:
    counts = {key: record.positive_count(key) for key in COUNTS if key in record}
    rates = {key: record.number_or_nan(key) for key in RATES if key in record}
    return counts | rates | {key: record.number(key) for key in FIGURES if key in record}


def read_history(path: Path, name: str) -> RunHistory:
    """The history in a file. Reports and leaves out a line that a killed run did not finish.

    Raises ValueError for a file without a training line.
    """
    history = RunHistory(name)
    file = OutsideFile(path, str(path), REMEDY, most_bytes=LOG_BYTES)
    for record in file.lines_of_members(lambda sentence: print(sentence, file=sys.stderr)):
        history.add(record)
    if not history.lines:
        raise ValueError(f"{path} holds no training iteration; {REMEDY}")
    return history


def read_histories(paths: Sequence[str], names: Sequence[str] | None) -> list[RunHistory]:
    """The history of each file. names: of the runs; None for distinct parts of the paths. Raises ValueError for a wrong number of names."""
    return [read_history(Path(path), name) for path, name in zip(paths, run_names(paths, names), strict=True)]


def run_names(paths: Sequence[str], names: Sequence[str] | None) -> list[str]:
    """The names as given, or a distinct one for each path, made of as few of its last parts as possible."""
    if names is not None:
        if len(names) != len(paths):
            raise ValueError(f"--names has {len(names)} names for {len(paths)} files of --log-jsonl; give one for each.")
        return list(names)
    parts = [Path(path).with_suffix("").parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(path[-count:]) for path in parts]
        if len(set(found)) == len(found):
            return found
    return list(paths)
