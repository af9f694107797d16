"""Prints a table that compares runs: bytes per step over each link, memory, time and loss, from the files of --log-jsonl."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from command import run_command
from plot_run import read_records

from megatron_zpp.config.outside import Members

MEGABYTE = 1e6


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
    validation_loss: float | None


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Prints the table. Raises ValueError for a wrong number of names, or for a file without a logged iteration."""
    names = args.names or [Path(path).stem for path in args.log_jsonl]
    if len(names) != len(args.log_jsonl):
        raise ValueError(f"--names has {len(names)} names for {len(args.log_jsonl)} files of --log-jsonl; give one for each.")
    print(table([summarize(name, read_records(Path(path))) for name, path in zip(names, args.log_jsonl, strict=True)]))


def summarize(name: str, records: Sequence[Members]) -> Summary:
    """The figures of one run. Raises ValueError if it logged no training iteration."""
    steps = [record for record in records if "lm_loss" in record]
    if not steps:
        raise ValueError(f"{name} has no logged iteration; train longer than one --log-interval.")
    last = steps[-1]
    validations = [record.number_or_nan("validation_loss") for record in records if "validation_loss" in record]
    return Summary(
        name=name,
        iterations=last.count("iteration"),
        inter_node_bytes=last.number("inter_node_bytes"),
        intra_node_bytes=last.number("intra_node_bytes"),
        model_state_bytes=last.number("model_state_bytes"),
        step_ms=median(step.number("elapsed_ms_per_iteration") for step in steps[1:] or steps),
        training_loss=last.number_or_nan("lm_loss"),
        validation_loss=validations[-1] if validations else None,
    )


def table(summaries: Sequence[Summary]) -> str:
    """A Markdown table with one row per run. The share is the run's bytes divided by those of the first run."""
    head = (
        "run",
        "iterations",
        "MB into a node",
        "share",
        "MB into a rank in its node",
        "state MB per rank",
        "step ms",
        "loss",
        "validation",
    )
    rows = [head, *(_row(summary, summaries[0]) for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def _row(summary: Summary, first: Summary) -> tuple[str, ...]:
    share = summary.inter_node_bytes / first.inter_node_bytes if first.inter_node_bytes else 0.0
    return (
        summary.name,
        str(summary.iterations),
        f"{summary.inter_node_bytes / MEGABYTE:.2f}",
        f"{share:.3f}",
        f"{summary.intra_node_bytes / MEGABYTE:.2f}",
        f"{summary.model_state_bytes / MEGABYTE:.2f}",
        f"{summary.step_ms:.0f}",
        f"{summary.training_loss:.4f}",
        "-" if summary.validation_loss is None else f"{summary.validation_loss:.4f}",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--log-jsonl", nargs="+", required=True, metavar="FILE", help="files that --log-jsonl of the training wrote")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="what to call the runs (default: the file names)")
    return parser


if __name__ == "__main__":
    main()
