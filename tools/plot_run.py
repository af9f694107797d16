"""Draws loss, learning rate and bytes per link of one run or several, from the files that --log-jsonl of the training wrote."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.command import count_from_1, printable, run_command
from run_logs.history import AXES, Axis, RunHistory, read_histories

from megatron_zpp.system.output_file import naming_file
from megatron_zpp.system.user_error import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEGABYTE = 1e6
SUFFIXES = (".png", ".svg")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Look:
    """How runs are drawn. smoothed_lines: draw the loss also as a mean over so many. log_scales: "x", "y" (of the loss)."""

    axis: Axis = field(default_factory=lambda: AXES["iteration"])
    smoothed_lines: int = 1
    log_scales: Sequence[str] = ()


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes the picture and prints its name. Raises UserError for a file without a logged iteration, or without what the axis needs."""
    output = Path(args.output)
    if output.suffix.lower() not in SUFFIXES:
        raise UserError(f"--output {output} is neither a PNG nor an SVG file; give a name that ends in .png or .svg.")
    runs = read_histories(args.log_jsonl, args.names)
    figure = draw(runs, Look(AXES[args.x_axis], args.smoothing, args.log_scale))
    output.parent.mkdir(parents=True, exist_ok=True)
    with naming_file(output):
        figure.savefig(output, dpi=150)
    for note in [note for history in runs for note in history.notes(of_sums=AXES[args.x_axis].is_mean)]:
        print(printable(note), file=sys.stderr)
    print(printable(f"{output}: {', '.join(history.name for history in runs)}"))


def draw(runs: Sequence[RunHistory], look: Look) -> "Figure":
    """Three plots over one axis, one under the other. If there are several runs, each has one colour."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(10, 8), layout="constrained")
    loss, rate, traffic = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    is_one = len(runs) == 1
    for index, history in enumerate(runs):
        name = _legend_text(history.name)
        label = "" if is_one else f"{name}: "
        solid, dashed = {"color": f"C{index}"}, {"color": "C1" if is_one else f"C{index}", "linestyle": "--"}
        positions = _positions(history, look.axis)
        at = dict(zip(history.losses(), positions, strict=True))
        _losses(loss, _at(at, history.losses()), f"{label}training", look.smoothed_lines, **solid)
        for set_name, points in history.validations.items():
            curve = [(history.place(iteration, positions, look.axis), value) for iteration, value in points]
            _line(loss, curve, f"{label}validation {_legend_text(set_name)}".rstrip(), marks=1, **dashed)
        _line(rate, _at(at, history.curve("learning_rate")), "" if is_one else name, **solid)
        _line(traffic, _at(at, history.curve("inter_node_bytes"), MEGABYTE), f"{label}between nodes,\ninto one node", **solid)
        _line(traffic, _at(at, history.curve("intra_node_bytes"), MEGABYTE), f"{label}inside a node,\ninto one rank", **dashed)
    _finish(loss, "loss (nats per token)")
    _finish(rate, "learning rate")
    _finish(traffic, "MB per step")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    traffic.set_ylim(0, 1.1 * max(map(_most_bytes, runs)) / MEGABYTE or 1)
    traffic.set_xlabel(look.axis.label)
    if look.axis.key:
        traffic.xaxis.set_major_formatter(EngFormatter())
    if "x" in look.log_scales:
        loss.set_xscale("log")
    if "y" in look.log_scales:
        loss.set_yscale("log")
    return figure


def running_means(values: Sequence[float], count: int) -> list[float]:
    """The mean of each value and the count - 1 before it, as far as there are so many.

    Values that are not finite are left out, and have the mean NaN.
    """
    is_finite = [math.isfinite(value) for value in values]
    sums = _running_sums([value if finite else 0.0 for value, finite in zip(values, is_finite, strict=True)], count)
    counts = _running_sums(is_finite, count)
    return [total / number if finite else math.nan for total, number, finite in zip(sums, counts, is_finite, strict=True)]


def _running_sums(values: Sequence[float], count: int) -> list[float]:
    """The sum of each value and the count - 1 before it.

    The values are cut into blocks of `count`; a sum adds the end of one block and the start of the next. Nothing is subtracted, so that
    a very large value does not spoil the sums after it.
    """
    starts: list[float] = []
    ends: list[float] = []
    for first in range(0, len(values), count):
        block = values[first : first + count]
        starts += accumulate(block)
        ends += reversed([*accumulate(reversed(block))])
    befores = [0.0 if last < count or (last + 1) % count == 0 else ends[last + 1 - count] for last in range(len(values))]
    return [before + start for before, start in zip(befores, starts, strict=True)]


def _positions(history: RunHistory, axis: Axis) -> list[float]:
    found = history.positions(axis)
    if axis.is_mean and found[-1] <= 0:
        raise UserError(f"{history.name} has no {axis.label}; choose another --x-axis.")
    return found


def _at(places: Mapping[int, float], curve: Mapping[int, float], unit: float = 1.0) -> Points:
    return [(places[iteration], value / unit) for iteration, value in curve.items()]


def _most_bytes(history: RunHistory) -> float:
    return max([*history.curve("inter_node_bytes").values(), *history.curve("intra_node_bytes").values()], default=0)


def _legend_text(name: str) -> str:
    """The name as matplotlib shows it as it is: without control characters and formulas, and in the legend even if it begins with _."""
    text = printable(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _losses(axes: "Axes", points: Points, label: str, smoothed_lines: int, **style: Any) -> None:
    if smoothed_lines == 1:
        _line(axes, points, label, **style)
        return
    _line(axes, points, "", alpha=0.3, **style)
    means = running_means([value for _, value in points], smoothed_lines)
    _line(
        axes, [(place, mean) for (place, _), mean in zip(points, means, strict=True)], f"{label},\nmean of {smoothed_lines} lines", **style
    )


def _line(axes: "Axes", points: Points, label: str, **style: Any) -> None:
    if points:
        marks = style.pop("marks", _lone_points(points))
        marker = "o" if marks else ""  # the legend would show it
        axes.plot(*zip(*points, strict=True), label=label, marker=marker, markevery=marks, markersize=4, linewidth=1.5, **style)


def _lone_points(points: Points) -> list[int]:
    """The indices of points without a finite neighbour, to which no stroke leads."""
    is_finite = [False, *(math.isfinite(value) for _, value in points), False]
    return [index for index in range(len(points)) if is_finite[index : index + 3] == [False, True, False]]


def _finish(axes: "Axes", label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plot_run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--log-jsonl", nargs="+", required=True, metavar="FILE", help="file of a run; several are drawn over each other")
    parser.add_argument("--output", required=True, metavar="FILE", help="picture to write: .png or .svg")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="what to call the runs (default: parts of the paths)")
    parser.add_argument(
        "--x-axis",
        choices=sorted(AXES),
        default="iteration",
        help="seconds: of training steps, without validations and checkpoints; bytes: into one node from others (default: iteration)",
    )
    parser.add_argument(
        "--smoothing", type=count_from_1, default=1, metavar="LINES", help="also draw the training loss as a mean over so many lines"
    )
    parser.add_argument("--log-scale", nargs="+", choices=("x", "y"), default=[], help="logarithmic axes; y: of the loss")
    return parser


if __name__ == "__main__":
    main()
