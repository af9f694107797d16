"""Measures the indices of a large corpus: time and peak memory to build them in C++ and in numpy, and the time to open cached ones.

    python -m benchmarks.data_index --documents 1000000 --tokens 1000000000

The corpus has synthetic lengths and no tokens: its .bin is a sparse file of the right size. Each figure comes from a process of its own.
The peak counts what the call allocates, including its result but not the lengths of the documents.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.report import ROOT, report
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data import index_builders
from megatron_zpp.data.datasets import DataRequest, SampleCounts, build_datasets
from megatron_zpp.data.gpt_indices import build_gpt_indices
from megatron_zpp.data.index_builders import deal_samples
from megatron_zpp.data.indexed_dataset import CODES, HEADER, MAGIC, VERSION

MEASURES = ("build", "blend", "open")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="data_index.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000, help="documents of the corpus (default: 1000000)")
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="tokens of the corpus (default: 1000000000)")
    parser.add_argument("--seq-length", type=int, default=1024, help="tokens of a sample (default: 1024)")
    parser.add_argument("--sources", type=int, default=8, help="corpora of the blend that is measured (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each figure is taken; the median counts (default: 5)")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--builder", choices=("C++", "numpy"), default="C++", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.measure is not None:
        print(json.dumps(measured(args)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        write_corpus(args.folder / "corpus", lengths_of(args))
        figures = [median_of(args, measure, builder) for measure, builder in rows()]
    setting = {name: getattr(args, name) for name in ("documents", "tokens", "seq_length", "sources", "rounds")}
    report("data_index", arguments, {"numpy": np.__version__, **setting}, table(args, figures), {"figures": figures}, args.output)
    return 0


def rows() -> list[tuple[str, str]]:
    return [("build", "C++"), ("build", "numpy"), ("blend", "C++"), ("blend", "numpy"), ("open", "C++")]


def lengths_of(args: argparse.Namespace) -> np.ndarray:
    """Log-normal lengths, like those of texts, with the given sum: [documents] int32."""
    drawn = np.random.RandomState(1).lognormal(0.0, 1.0, args.documents)
    lengths = np.floor(drawn * (args.tokens / drawn.sum())).astype(np.int32)
    lengths[: args.tokens - int(lengths.sum(dtype=np.int64))] += 1
    return lengths


def write_corpus(prefix: Path, lengths: np.ndarray) -> None:
    """Writes PREFIX.idx in full, and PREFIX.bin as a sparse file."""
    dtype = np.dtype("<u2")
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(lengths), len(lengths) + 1))
        for values in (
            lengths.astype("<i4"),
            (ends - lengths.astype(np.int64) * dtype.itemsize).astype("<i8"),
            np.arange(len(lengths) + 1),
        ):
            file.write(values.astype(values.dtype.newbyteorder("<")).data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(ends[-1]))


def median_of(args: argparse.Namespace, measure: str, builder: str) -> dict[str, object]:
    """Medians over rounds, each measured in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.data_index", "--measure", measure, "--builder", builder, "--folder", str(args.folder)]
    command += [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("documents", "tokens", "seq-length", "sources")]
    found = [json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout) for _ in range(args.rounds)]
    names = ("seconds", "cpu_seconds", "peak_megabytes")
    return {"measure": measure, "builder": builder, **{name: statistics.median(figures[name] for figures in found) for name in names}}


def measured(args: argparse.Namespace) -> dict[str, float]:
    """Wall and CPU seconds of one call in this process, and the peak of the memory that it allocates."""
    if args.builder == "numpy":
        index_builders.uses_kernels = lambda: False
    elif not index_builders.uses_kernels():
        raise SystemExit("The kernels are not built; run bash scripts/build_extensions.sh.")
    lengths = lengths_of(args) if args.measure == "build" else np.empty(0, dtype=np.int32)
    sample_count = args.tokens // args.seq_length
    if args.measure == "open":
        open_cached(args, sample_count)  # builds the indices if this is the first round
    call = partial(measured_call, args, lengths, sample_count)
    started, cpu_started = time.perf_counter(), time.process_time()
    call()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    tracemalloc.start()  # sees numpy's arrays, which C++ fills too; a second call, because tracing slows the plain loop
    call()
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_megabytes": tracemalloc.get_traced_memory()[1] / 1e6}


def measured_call(args: argparse.Namespace, lengths: np.ndarray, sample_count: int) -> None:
    if args.measure == "build":
        build_gpt_indices(lengths, range(args.documents), sample_count=sample_count, seq_length=args.seq_length, seed=1234)
    elif args.measure == "blend":
        weights = np.arange(1, args.sources + 1, dtype=np.float64)
        deal_samples(weights / weights.sum(), sample_count)
    else:
        open_cached(args, sample_count)


def open_cached(args: argparse.Namespace, sample_count: int) -> None:
    """Does what a run does at its start: opens the corpus, finds the indices by its contents, maps them, and reads a sample."""
    request = DataRequest(args.seq_length, 1234, SampleCounts(sample_count, 0, 0), vocab_size=1, eod=0)
    build_datasets(DataConfig(data_path=(str(args.folder / "corpus"),), split="1"), request).train[0]


def table(args: argparse.Namespace, figures: list[dict[str, object]]) -> str:
    blend = f"blend of {args.sources} corpora, {args.tokens // args.seq_length:,} samples"
    words = {
        "build": f"indices of {args.tokens:,} tokens in {args.documents:,} documents",
        "blend": blend,
        "open": "opening the cached indices",
    }
    lines = ["| what | with | seconds | of a core | peak of memory, MB |", "| --- | --- | ---: | ---: | ---: |"]
    for row in figures:
        seconds = f"{row['seconds']:.3f} | {row['cpu_seconds']:.3f}"
        lines.append(f"| {words[str(row['measure'])]} | {row['builder']} | {seconds} | {row['peak_megabytes']:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
