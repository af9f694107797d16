"""Measures the speed and the memory of tools/preprocess_data.py beside a plain loop over the same tokenizer.

    python benchmarks/preprocess.py
    python benchmarks/preprocess.py --memory-megabytes 200 1000

Prints tables in Markdown and writes the same as JSON. The corpus is the standard library's sources as JSON lines, repeated; the tokenizers
are trained on it. It is cut into slices, and loop and tool take turns on each slice, so that other load on the machine slows both.
Megabytes are those of JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import preprocess_data  # noqa: E402
from collect_corpus import write_corpus  # noqa: E402
from report import report  # noqa: E402
from train_tokenizer import train_model  # noqa: E402

from megatron_zpp.config.schema import DataConfig  # noqa: E402
from megatron_zpp.data.indexed_dataset import IndexedDataset  # noqa: E402
from megatron_zpp.data.tokenizers.token_ids import TokenizedTexts  # noqa: E402
from megatron_zpp.data.tokenizers.tokenizer import Tokenizer  # noqa: E402

SENTENCEPIECE_VOCAB_SIZE = 8192
GPT2_VOCAB_SIZE = 16384
TRAINING_TEXTS = 400
SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Kind:
    """One tokenizer: its name in the tables and the flags that describe it."""

    name: str
    flags: list[str]


# Text that is ids already: it passes fastest through reading, queues and writing, and so needs the most memory.
IDS = Kind("ids", ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(2**31 - 1)])


@dataclass
class Seconds:
    """Seconds of all slices together. wall: by the clock; cpu: CPU time of all processes."""

    plain_wall: float = 0.0
    plain_cpu: float = 0.0
    one_worker_cpu: float = 0.0
    one_worker_tokenizer_cpu: float = 0.0
    all_workers_wall: float = 0.0
    all_workers_cpu: float = 0.0

    def add(self, other: Seconds) -> None:
        for member in fields(self):
            setattr(self, member.name, getattr(self, member.name) + getattr(other, member.name))


@dataclass(frozen=True)
class Result:
    """One tokenizer's rates. The speed-up by CPU time is the speed-up on cores that run nothing else."""

    tokenizer: str
    megabytes: float
    tokens: int
    workers: int
    seconds: Seconds

    @property
    def speed_up(self) -> float:
        return self.seconds.plain_wall / self.seconds.all_workers_wall

    @property
    def speed_up_by_cpu_time(self) -> float:
        return self.workers * self.seconds.plain_cpu / self.seconds.all_workers_cpu

    @property
    def share_outside_tokenizer(self) -> float:
        return 1 - self.seconds.one_worker_tokenizer_cpu / self.seconds.one_worker_cpu


class TimedTokenizer:
    """A tokenizer that measures the CPU time spent in it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.eod = tokenizer.eod
        self.cpu_seconds = 0.0

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.tokenize(text)

    def tokenize_batch(self, texts: Sequence[str]) -> TokenizedTexts:
        began = time.process_time()
        tokenized = self._tokenizer.tokenize_batch(texts)
        self.cpu_seconds += time.process_time() - began
        return tokenized

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.detokenize(ids)


def main(argv: Sequence[str]) -> None:
    args = _parser().parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_corpus(Path(os.__file__).parent, folder / "corpus.jsonl", max_bytes=1 << 40)
        kinds = {kind.name: kind for kind in (*train_tokenizers(folder), IDS)}
        results = [measure(kinds[name], folder, args) for name in args.tokenizers] if args.megabytes else []
        if args.memory_tokenizer == IDS.name:
            write_ids(folder / "corpus.jsonl")
        memory = measure_memory(kinds[args.memory_tokenizer], folder, args) if args.memory_megabytes else {}
    setting = {"workers": args.workers, "Python": platform.python_version()}
    tables = "\n\n".join(table for table in (speed_table(results), memory_table(memory)) if table)
    figures = {"speed": [asdict(result) for result in results], "memory": memory}
    report("preprocess.py", argv, setting, tables, figures, args.output)


def train_tokenizers(folder: Path) -> list[Kind]:
    """Trains a SentencePiece BPE model and a GPT-2 BPE on the corpus."""
    from tokenizers import ByteLevelBPETokenizer

    with open(folder / "corpus.jsonl", encoding="utf-8") as corpus:
        texts = [json.loads(line)["text"] for line in corpus]
    stride = max(1, len(texts) // TRAINING_TEXTS)
    (folder / "sp.model").write_bytes(train_model(texts[::stride], vocab_size=SENTENCEPIECE_VOCAB_SIZE, model_type="bpe"))
    gpt2 = ByteLevelBPETokenizer()
    gpt2.train_from_iterator(texts[::stride], vocab_size=GPT2_VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False)
    gpt2.save_model(str(folder))
    files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    return [
        Kind("SentencePiece", ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(folder / "sp.model")]),
        Kind("GPT-2 BPE", ["--tokenizer-type", "GPT2BPETokenizer", *files]),
    ]


def write_ids(path: Path) -> None:
    """Writes a corpus of documents with 1 to 1000 ids of nine digits."""
    lengths = np.random.default_rng(1).integers(1, 1000, 2000).tolist()
    path.write_text("".join(json.dumps({"text": " ".join(["123456789"] * length)}) + "\n" for length in lengths))


def measure(kind: Kind, folder: Path, args: argparse.Namespace) -> Result:
    """Runs loop and tool in turns on slices of the corpus."""
    total, text_bytes, tokens = Seconds(), 0, 0
    for number, path in enumerate(slices(folder, int(args.megabytes * 1e6), int(args.slice_megabytes * 1e6))):
        flags = tool_flags(kind, path, folder / "out")
        # The second of them finds the slice in memory, so the order alternates.
        steps = [lambda flags=flags: run_plain(flags), lambda flags=flags: run_tool(flags, args.workers)]
        for step in steps if number % 2 == 0 else reversed(steps):
            total.add(step())
        total.add(run_timed(flags))
        text_bytes += path.stat().st_size
        tokens += IndexedDataset(str(folder / "out_text_document")).token_count
        so_far = Result(kind.name, text_bytes / 1e6, tokens, args.workers, total)
        print(f"{kind.name}, {so_far.megabytes:.0f} MB: {so_far.speed_up:.2f} times the plain loop", file=sys.stderr, flush=True)
        path.unlink()
    return Result(kind.name, text_bytes / 1e6, tokens, args.workers, total)


def run_plain(flags: argparse.Namespace) -> Seconds:
    """The plain loop: reads, parses and tokenises line by line, and writes one array at the end."""
    began, began_cpu = time.perf_counter(), time.process_time()
    tokenizer = preprocess_data._job(flags).encoder.tokenizer
    documents = []
    with open(flags.input[0], encoding="utf-8") as lines:
        for line in lines:
            documents.append(np.array([*tokenizer.tokenize(json.loads(line)["text"]), tokenizer.eod], dtype=np.int32))
    np.concatenate(documents).tofile(f"{flags.output_prefix}.plain")
    return Seconds(plain_wall=time.perf_counter() - began, plain_cpu=time.process_time() - began_cpu)


def run_tool(flags: argparse.Namespace, workers: int) -> Seconds:
    """The tool, without the start of the interpreter, which happens once per corpus."""
    flags.workers = workers
    began, began_cpu = time.perf_counter(), _cpu_seconds()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        preprocess_data.run(flags)
    return Seconds(all_workers_wall=time.perf_counter() - began, all_workers_cpu=_cpu_seconds() - began_cpu)


def run_timed(flags: argparse.Namespace) -> Seconds:
    """The tool in one process; measures the tokenizer's part of its CPU time."""
    flags.workers = 1
    build, timed = preprocess_data.build_tokenizer, []

    def build_timed(data: DataConfig) -> TimedTokenizer:
        began = time.process_time()
        timed.append(TimedTokenizer(build(data)))
        timed[-1].cpu_seconds += time.process_time() - began
        return timed[-1]

    preprocess_data.build_tokenizer = build_timed
    began = time.process_time()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            preprocess_data.run(flags)
    finally:
        preprocess_data.build_tokenizer = build
    return Seconds(one_worker_cpu=time.process_time() - began, one_worker_tokenizer_cpu=timed[0].cpu_seconds)


def measure_memory(kind: Kind, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Peak megabytes of all processes of the tool together, for each number of megabytes of input."""
    peaks = {}
    for megabytes in args.memory_megabytes:
        (path,) = slices(folder, int(megabytes * 1e6), int(megabytes * 1e6))
        flags = [*kind.flags, "--workers", str(args.workers), "--input", str(path), "--output-prefix", str(folder / "memory")]
        command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *flags]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            peaks[f"{megabytes:g}"] = _peak_megabytes(process)
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        print(f"{kind.name}, {megabytes:g} MB: {peaks[f'{megabytes:g}']:.0f} MB of memory at most", file=sys.stderr, flush=True)
        path.unlink()
    return peaks


def slices(folder: Path, total_bytes: int, slice_bytes: int) -> Iterator[Path]:
    """Files with the corpus's lines, repeated as needed: each has slice_bytes or a little more, all together total_bytes."""
    lines = (folder / "corpus.jsonl").read_bytes().splitlines(keepends=True)
    written = place = 0
    while written < total_bytes:
        path = folder / f"slice{written}.jsonl"
        with open(path, "wb") as file:
            while file.tell() < slice_bytes:
                file.write(lines[place % len(lines)])
                place += 1
            written += file.tell()
        yield path


def speed_table(results: Sequence[Result]) -> str:
    if not results:
        return ""
    columns = "tokenizer,MB,plain loop MB/s,tool MB/s,million tokens/s,MB/s per core,x plain loop,x by CPU time,outside tokenizer"
    head = f"| {columns.replace(',', ' | ')} |"
    return "\n".join([head, "|---|---:|---:|---:|---:|---:|---:|---:|---:|", *map(_speed_row, results)])


def memory_table(peaks: dict[str, float]) -> str:
    if not peaks:
        return ""
    rows = [f"| {megabytes} | {peak:.0f} |" for megabytes, peak in peaks.items()]
    ratio = max(peaks.values()) / min(peaks.values())
    return "\n".join(["| MB of input | MB of memory |", "|---:|---:|", *rows]) + f"\n\nLargest over smallest: {ratio:.3f}"


def tool_flags(kind: Kind, path: Path, prefix: Path) -> argparse.Namespace:
    return preprocess_data._parser().parse_args(["--input", str(path), "--output-prefix", str(prefix), "--append-eod", *kind.flags])


def _speed_row(result: Result) -> str:
    seconds = result.seconds
    rate = result.megabytes / seconds.all_workers_wall
    return (
        f"| {result.tokenizer} | {result.megabytes:.0f} | {result.megabytes / seconds.plain_wall:.2f} | {rate:.2f} "
        f"| {result.tokens / 1e6 / seconds.all_workers_wall:.2f} | {rate / result.workers:.2f} | {result.speed_up:.2f} "
        f"| {result.speed_up_by_cpu_time:.2f} | {result.share_outside_tokenizer:.1%} |"
    )


def _cpu_seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak_megabytes(process: subprocess.Popen[bytes]) -> float:
    peak_bytes = 0
    waiting = threading.Event()
    while process.poll() is None:
        peak_bytes = max(peak_bytes, sum(map(_resident_bytes, _family(process.pid))))
        waiting.wait(SAMPLE_SECONDS)
    return peak_bytes / 1e6


def _family(process_id: int) -> list[int]:
    try:
        children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    except OSError:
        return []
    return [process_id, *(member for child in children for member in _family(int(child)))]


def _resident_bytes(process_id: int) -> int:
    """The process's memory; a page that n processes share counts 1 / n."""
    try:
        lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("SentencePiece", "GPT-2 BPE")
    parser.add_argument("--megabytes", type=float, default=200, help="of JSON lines to tokenise, 0 for none (default: 200)")
    parser.add_argument("--slice-megabytes", type=float, default=20, help="of each turn (default: 20)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="(default: one per core)")
    parser.add_argument("--tokenizers", nargs="+", choices=names, default=list(names), help="(default: both)")
    parser.add_argument("--memory-megabytes", type=float, nargs="+", help="measure peak memory at these sizes of input")
    parser.add_argument("--memory-tokenizer", choices=(*names, IDS.name), default="GPT-2 BPE", help="(default: GPT-2 BPE)")
    parser.add_argument("--folder", help="where the corpus is put for the time of the run (default: the system's)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "preprocess.json")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
