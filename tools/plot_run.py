"""Draws loss, learning rate and bytes per link of one run or several, from the files that --log-jsonl of the training wrote."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command import run_command

from megatron_zpp.config.outside import LOG_BYTES, Members, OutsideFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEGABYTE = 1e6
TRAFFIC = frozenset({"inter_node_bytes", "intra_node_bytes"})  # always finite
CURVE_OF_KEY = {
    "lm_loss": "training_loss",
    "validation_loss": "validation_loss",
    "learning_rate": "learning_rate",
    "inter_node_bytes": "inter_node_bytes",
    "intra_node_bytes": "intra_node_bytes",
}


@dataclass(frozen=True)
class Curves:
    """The logged values of one run. Each curve maps iterations, ascending, to values."""

    name: str
    training_loss: Mapping[int, float]
    validation_loss: Mapping[int, float]
    learning_rate: Mapping[int, float]
    inter_node_bytes: Mapping[int, float]
    intra_node_bytes: Mapping[int, float]


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes the picture and prints its name. Raises ValueError for a file without a logged iteration."""
    output = Path(args.output)
    if output.suffix.lower() != ".png":
        raise ValueError(f"--output {output} is not a PNG file; give a name that ends in .png.")
    names = distinct_names(args.log_jsonl)
    runs = [read_curves(Path(path), name) for path, name in zip(args.log_jsonl, names, strict=True)]
    output.parent.mkdir(parents=True, exist_ok=True)
    draw(runs).savefig(output, dpi=150)
    print(f"{output}: {', '.join(names)}")


def distinct_names(paths: Sequence[str]) -> list[str]:
    """A distinct name for each path, made of as few of its last parts as possible."""
    parts = [Path(path).with_suffix("").parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def read_curves(path: Path, name: str) -> Curves:
    """The curves in one file. If a resumed run logged an iteration again, the last value counts."""
    curves: dict[str, dict[int, float]] = {key: {} for key in CURVE_OF_KEY}
    for found in read_records(path):
        for key in curves.keys() & found.values.keys():
            curves[key][found.count("iteration")] = found.number(key) if key in TRAFFIC else found.number_or_nan(key)
    if not curves["lm_loss"]:
        raise ValueError(f"{path} holds no training iteration; give a file that --log-jsonl of pretrain_zeropp_gpt.py wrote.")
    return Curves(name, **{CURVE_OF_KEY[key]: dict(sorted(curve.items())) for key, curve in curves.items()})


def read_records(path: Path) -> list[Members]:
    """The JSON objects in the lines of the file, each with an iteration. Reports and leaves out a line that a killed run did not finish."""
    file = OutsideFile(path, str(path), "give a file that --log-jsonl of pretrain_zeropp_gpt.py wrote.", most_bytes=LOG_BYTES)
    records = list(file.lines_of_members(lambda sentence: print(sentence, file=sys.stderr)))
    for record in records:
        record.count("iteration")
    return records


def draw(runs: Sequence[Curves]) -> "Figure":
    """Three plots over the iterations, one under the other. If there are several runs, each has one colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    loss, rate, traffic = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    is_one = len(runs) == 1
    for index, curves in enumerate(runs):
        label = "" if is_one else f"{curves.name}: "
        solid, dashed = {"color": f"C{index}"}, {"color": "C1" if is_one else f"C{index}", "linestyle": "--"}
        _line(loss, curves.training_loss, f"{label}training", **solid)
        _line(loss, curves.validation_loss, f"{label}validation", marker="o", **dashed)
        _line(rate, curves.learning_rate, "" if is_one else curves.name, **solid)
        _line(traffic, _megabytes(curves.inter_node_bytes), f"{label}between nodes,\ninto one node", **solid)
        _line(traffic, _megabytes(curves.intra_node_bytes), f"{label}inside a node,\ninto one rank", **dashed)
    _finish(loss, "loss (nats per token)")
    _finish(rate, "learning rate")
    _finish(traffic, "MB per step")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    traffic.set_ylim(0, 1.1 * max(map(_most_bytes, runs)) / MEGABYTE or 1)
    traffic.set_xlabel("iteration")
    return figure


def _most_bytes(curves: Curves) -> float:
    return max([*curves.inter_node_bytes.values(), *curves.intra_node_bytes.values()], default=0)


def _line(axes: "Axes", curve: Mapping[int, float], label: str, **style: Any) -> None:
    if curve:
        marker = style.pop("marker", "o" if len(curve) == 1 else "")
        axes.plot(list(curve), list(curve.values()), label=label, marker=marker, markersize=4, linewidth=1.5, **style)


def _finish(axes: "Axes", label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")


def _megabytes(curve: Mapping[int, float]) -> dict[int, float]:
    return {iteration: value / MEGABYTE for iteration, value in curve.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plot_run.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--log-jsonl", nargs="+", required=True, metavar="FILE", help="file of a run; several are drawn over each other")
    parser.add_argument("--output", required=True, metavar="PNG", help="picture to write")
    return parser


if __name__ == "__main__":
    main()
