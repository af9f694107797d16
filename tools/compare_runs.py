"""Prints tables that compare runs: bytes per step, memory, time and loss, and what it took to reach one loss, from files of --log-jsonl."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from cli.command import printable, run_command
from run_logs.history import AXES, REMEDY, RunHistory, read_histories

MEGABYTE = 1e6
NEEDED = ("inter_node_bytes", "intra_node_bytes", "model_state_bytes", "elapsed_ms_per_iteration")
# By axis: title and unit.
COSTS = {"tokens": ("tokens", 1.0), "seconds": ("seconds of steps", 1.0), "bytes": ("MB into a node so far", MEGABYTE)}
NOT_LOGGED, NOT_REACHED = "not logged", "not reached"


@dataclass(frozen=True)
class Summary:
    """The figures of one run. Bytes are those of the last logged step. The time is the median of all logged steps except the first."""

    name: str
    iterations: int
    inter_node_bytes: float
    intra_node_bytes: float
    model_state_bytes: float
    step_ms: float
    training_loss: float
    validation_losses: Mapping[str, float]  # the last one of each set; the name is empty if there is only one set


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Prints the tables. Raises UserError for a wrong number of names, or for a file without a logged iteration."""
    histories = read_histories(args.log_jsonl, args.names)
    print(table([summarize(history) for history in histories]))
    loss = worst_final_loss(histories) if args.at_loss is None else args.at_loss
    print()
    if loss is None:
        print("No run ends with a finite loss, so there is none at which to compare them; give --at-loss.")
    else:
        print(f"Up to the first line with a training loss of at most {loss:.4f}:\n\n{loss_table(histories, loss)}")
    for note in [note for history in histories for note in history.notes()]:
        print(printable(note), file=sys.stderr)


def summarize(history: RunHistory) -> Summary:
    """The figures of one run. Raises UserError if its lines lack one of them."""
    history.require(*NEEDED, remedy=REMEDY)
    inter, intra, states, step_ms = map(history.figures, NEEDED)
    return Summary(
        name=printable(history.name),
        iterations=history.iterations[-1],
        inter_node_bytes=inter[-1],
        intra_node_bytes=intra[-1],
        model_state_bytes=states[-1],
        step_ms=median(step_ms[1:] or step_ms),
        training_loss=history.last_loss,
        validation_losses={name: points[-1][1] for name, points in history.validations.items() if points},
    )


def worst_final_loss(histories: Sequence[RunHistory]) -> float | None:
    """The highest of the runs' last training losses, which every run with a finite one has reached; None if none is finite."""
    return max((history.last_loss for history in histories if math.isfinite(history.last_loss)), default=None)


def loss_table(histories: Sequence[RunHistory], loss: float) -> str:
    """A Markdown table of what each run had cost at its first line with a training loss of at most `loss`."""
    return markdown([("run", "iterations", *(title for title, _ in COSTS.values())), *(_costs(history, loss) for history in histories)])


def _costs(history: RunHistory, loss: float) -> tuple[str, ...]:
    index = history.first_at(loss)
    if index is None:
        return (printable(history.name), NOT_REACHED, *("-" for _ in COSTS))
    cells = []
    for axis, (_, unit) in COSTS.items():
        try:
            cells.append(f"{history.positions(AXES[axis])[index] / unit:.{0 if axis == 'tokens' else 1}f}")
        except ValueError:  # an older version wrote the log
            cells.append(NOT_LOGGED)
    return (printable(history.name), str(history.iterations[index]), *cells)


def table(summaries: Sequence[Summary]) -> str:
    """A Markdown table with one row per run. The share is the run's bytes into a node divided by those of the first run."""
    sets = list(dict.fromkeys(name for summary in summaries for name in summary.validation_losses)) or [""]
    head = (
        "run",
        "iterations",
        "MB into a node in the last step",
        "share of the first run",
        "MB into a rank in its node in the last step",
        "state MB per rank",
        "step ms",
        "loss",
        *(printable(f"validation {name}".rstrip()) for name in sets),
    )
    return markdown([head, *(_row(summary, summaries[0], sets) for summary in summaries)])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table. The first row is its head."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def _row(summary: Summary, first: Summary, sets: Sequence[str]) -> tuple[str, ...]:
    return (
        summary.name,
        str(summary.iterations),
        f"{summary.inter_node_bytes / MEGABYTE:.2f}",
        _share(summary.inter_node_bytes, first.inter_node_bytes),
        f"{summary.intra_node_bytes / MEGABYTE:.2f}",
        f"{summary.model_state_bytes / MEGABYTE:.2f}",
        f"{summary.step_ms:.0f}",
        f"{summary.training_loss:.4f}",
        *(f"{summary.validation_losses[name]:.4f}" if name in summary.validation_losses else "-" for name in sets),
    )


def _share(nbytes: float, first_bytes: float) -> str:
    """The share of the first run's bytes; `-` if that run sends nothing."""
    return f"{nbytes / first_bytes:.3f}" if first_bytes else "-"


def _loss(text: str) -> float:
    """The type of --at-loss. Raises ArgumentTypeError unless the text is a positive finite number."""
    try:
        loss = float(text)
    except ValueError:
        loss = math.nan
    if not 0 < loss < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a training loss; give a finite number above 0, in nats per token")
    return loss


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--log-jsonl", nargs="+", required=True, metavar="FILE", help="files that --log-jsonl of the training wrote")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="what to call the runs (default: parts of the paths)")
    parser.add_argument(
        "--at-loss", type=_loss, metavar="LOSS", help="training loss at which to compare costs (default: the worst final loss of the runs)"
    )
    return parser


if __name__ == "__main__":
    main()
