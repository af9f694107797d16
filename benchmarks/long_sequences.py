"""Measures the memory of activations on ranks that divide samples, and trains within a limit of memory that one rank alone exceeds.

    python -m benchmarks.long_sequences --output benchmarks/results/long_sequences.json

Ranks are processes over gloo on one machine. A table has the peak of resident memory in the second step, minus what was resident before
it, on the rank that needs most, and the plan of what exists only inside a step: activations with what is exchanged, gathered units, and
means. Then one rank and --limited-ranks ranks train on one long sample, each with a limit (RLIMIT_DATA) of --limit-mib beyond what it had
before its model was built.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.files import read_json
from benchmarks.gpu.rank_processes import ONE_GPU_EACH, Ended, run_ranks
from benchmarks.report import report

MIB = 2**20
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --vocab-size 512 --mock-data --train-iters 10 --attention-dropout 0 "
    "--hidden-dropout 0 --position-embedding-type rope --micro-batch-size 1 --zero-stage 3"
)
STEPS = 2
SECONDS_PER_RUN = 3600.0
# glibc would keep freed blocks of up to 32 MiB, and they would count as resident. Blocks above this size go back at once.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Measured:
    """One run. losses: of each step. peak_bytes, planned_bytes: of the rank that needs most."""

    tokens: int
    ranks: int
    losses: list[float]
    peak_bytes: int
    planned_bytes: int


@dataclass(frozen=True)
class Limited:
    """Runs of one sample with a limit of memory for each rank. alone: of one rank; None if it failed with `error`."""

    limit_bytes: int
    together: Measured
    alone: Measured | None
    error: str


class RunFailed(RuntimeError):
    """A run did not end well; the text is the last line of each rank that failed."""

    def __init__(self, ended: Sequence[Ended]) -> None:
        super().__init__("\n".join(end.said[-1] for end in ended if end.code != 0 and end.said))


def main() -> None:
    options = _parser().parse_args()
    measured = [run(tokens, ranks) for tokens in options.tokens for ranks in options.ranks]
    limited = limited_runs(options.limited_tokens, options.limited_ranks, options.limit_mib * MIB)
    text = "\n".join([*table(measured), "", about(limited)])
    report(
        "long_sequences",
        sys.argv[1:],
        {"model": MODEL},
        text,
        {"measured": [asdict(one) for one in measured], "limited": asdict(limited)},
        options.output,
    )


def run(tokens: int, ranks: int, limit_bytes: int = 0) -> Measured:
    """Trains on one sample that `ranks` ranks divide. Raises RunFailed if a rank fails, as with too low a limit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["-m", "benchmarks.long_sequences_rank", str(folder / "found"), str(STEPS), str(limit_bytes), *MODEL.split()]
        words += ["--seq-length", str(tokens)]
        ended = run_ranks(words, ranks, ONE_GPU_EACH, folder, Deadline(SECONDS_PER_RUN), ENVIRONMENT)
        if any(end.code != 0 for end in ended):
            raise RunFailed(ended)
        found = [read_json(folder / f"found.{rank}.json") for rank in range(ranks)]
    most = max(found, key=lambda of_rank: of_rank["peak_bytes"])
    return Measured(tokens, ranks, most["losses"], most["peak_bytes"], most["planned_bytes"])


def limited_runs(tokens: int, ranks: int, limit_bytes: int) -> Limited:
    """Raises RunFailed if the ranks that divide the sample fail, too."""
    together = run(tokens, ranks, limit_bytes)
    try:
        return Limited(limit_bytes, together, run(tokens, 1, limit_bytes), "")
    except RunFailed as error:
        return Limited(limit_bytes, together, None, str(error))


def table(measured: Sequence[Measured]) -> list[str]:
    one = {run.tokens: run.peak_bytes for run in measured if run.ranks == 1}
    rows = ["| tokens | ranks | MiB per rank | of one rank | planned MiB |", "| ---: | ---: | ---: | ---: | ---: |"]
    for found in measured:
        share = f"{found.peak_bytes / one[found.tokens]:.3f}" if found.tokens in one else ""
        rows.append(f"| {found.tokens} | {found.ranks} | {found.peak_bytes / MIB:.1f} | {share} | {found.planned_bytes / MIB:.1f} |")
    return rows


def about(limited: Limited) -> str:
    """The result in words."""
    together, limit = limited.together, limited.limit_bytes / MIB
    losses = " and ".join(f"{loss:.4f}" for loss in together.losses)
    alone = f"ends: {limited.error.splitlines()[-1]}" if limited.alone is None else "trains, too"
    return (
        f"{together.ranks} ranks with {limit:.0f} MiB each train on a sample of {together.tokens} tokens (losses {losses}, peak "
        f"{together.peak_bytes / MIB:.1f} MiB); one rank with as much {alone}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384], help="lengths of samples (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--limited-tokens", type=int, default=32768, help="length of the sample under a limit (default: %(default)s)")
    parser.add_argument("--limited-ranks", type=int, default=4, help="ranks that divide it (default: %(default)s)")
    parser.add_argument("--limit-mib", type=int, default=400, help="limit of memory of each rank, in MiB (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write the figures to")
    return parser


if __name__ == "__main__":
    main()
