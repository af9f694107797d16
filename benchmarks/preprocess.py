"""Measures what tools/preprocess_data.py needs of the processor beside other ways from the same text to ids.

    python -m benchmarks.preprocess --before CHECKOUT
    python -m benchmarks.preprocess --megabytes 0 --memory-megabytes 200 1000

Prints tables in Markdown and writes the same as JSON. The corpus is text files of this machine (.py, .rst, .md and .txt), each once, as
JSON lines; the tokenizers are trained on a part of it. Every way runs in processes of its own. Their CPU seconds count, which other load on
the machine changes little, and ways take turns in every round. Megabytes are those of JSON lines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import ROOT, report
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.tokenizers.batch_tokenizer import BatchTokenizer
from megatron_zpp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer

SENTENCEPIECE_VOCAB_SIZE = 16000
GPT2_VOCAB_SIZE = 32000
TRAINING_SHARE = 15  # every 15th document
MEGATRON_CHUNK = 32  # lines that a worker of Megatron's tool takes at a time
ENDINGS = (".py", ".rst", ".md", ".txt")
LARGEST_FILE_BYTES = 2_000_000
SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Kind:
    """One tokenizer: its name in the tables, and the fields of DataConfig that describe it."""

    name: str
    fields: dict[str, Any]

    @property
    def flags(self) -> list[str]:
        return [word for name, value in self.fields.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(DataConfig(**self.fields))


# Text that is ids already: it passes fastest through reading, queues and writing, and so needs the most memory.
IDS = Kind("ids", {"tokenizer_type": "NullTokenizer", "vocab_size": 2**31 - 1})


@dataclass
class Result:
    """CPU seconds of each way, and how many megabytes that were, all rounds together."""

    tokenizer: str
    megabytes: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, way: str, megabytes: float, seconds: float) -> None:
        self.megabytes[way] = self.megabytes.get(way, 0.0) + megabytes
        self.seconds[way] = self.seconds.get(way, 0.0) + seconds

    def rate(self, way: str) -> float:
        """Megabytes per CPU second."""
        return self.megabytes[way] / self.seconds[way] if way in self.seconds else float("nan")


def main(argv: Sequence[str]) -> None:
    args = _parser().parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_texts(args.texts, folder / "corpus.jsonl", int(max(args.megabytes, 20) * 1e6))
        kinds = {kind.name: kind for kind in (*train_tokenizers(folder), IDS)}
        results = [measure(kinds[name], folder, args) for name in args.tokenizers] if args.megabytes else []
        if args.memory_tokenizer == IDS.name:
            write_ids(folder / "corpus.jsonl")
        memory = measure_memory(kinds[args.memory_tokenizer], folder, args) if args.memory_megabytes else {}
    setting = {"workers": args.workers}
    tables = "\n\n".join(table for table in (speed_table(results), memory_table(memory)) if table)
    figures = {"speed": [{**vars(result), "rates": {way: result.rate(way) for way in WAYS}} for result in results], "memory": memory}
    report("preprocess", argv, setting, tables, figures, args.output)


def write_texts(folders: Sequence[str], path: Path, most_bytes: int) -> None:
    """Writes files below the folders as JSON lines, in a random order that does not change, until they have that many bytes."""
    found = sorted({file.resolve() for folder in folders for file in Path(folder).rglob("*") if file.suffix in ENDINGS and file.is_file()})
    random.Random(1).shuffle(found)
    seen, written = set(), 0
    with open(path, "w", encoding="utf-8") as corpus:
        for file in found:
            text = _text_of(file)
            if text.strip() and text not in seen and written < most_bytes:
                seen.add(text)
                written += corpus.write(json.dumps({"text": text}) + "\n")
    if written < most_bytes:
        print(f"Only {written / 1e6:.0f} MB of text were found below {' '.join(folders)}.", file=sys.stderr)


def train_tokenizers(folder: Path) -> list[Kind]:
    """Trains a SentencePiece BPE model, and a GPT-2 BPE, which is written as a tokenizer.json as well."""
    from tokenizers import ByteLevelBPETokenizer

    with open(folder / "corpus.jsonl", encoding="utf-8") as corpus:
        lines = [line for place, line in enumerate(corpus) if place % TRAINING_SHARE == 0]
    part, prefix = folder / "training.jsonl", folder / "sp"
    part.write_text("".join(lines), encoding="utf-8")
    flags = ["--input", str(part), "--model-prefix", str(prefix), "--vocab-size", str(SENTENCEPIECE_VOCAB_SIZE)]
    flags += ["--max-megabytes", str(1 + part.stat().st_size / 1e6)]  # all of it
    subprocess.run([sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), *flags], check=True, stdout=subprocess.DEVNULL)
    texts = [json.loads(line)["text"] for line in lines]
    gpt2 = ByteLevelBPETokenizer()
    gpt2.train_from_iterator(texts, vocab_size=GPT2_VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False)
    gpt2.save_model(str(folder))
    gpt2.save(str(folder / "tokenizer.json"))
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return [
        Kind("GPT-2 BPE", {"tokenizer_type": "GPT2BPETokenizer", **files}),
        Kind("Hugging Face", {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer.json")}),
        Kind("SentencePiece", {"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": f"{prefix}.model"}),
    ]


def write_ids(path: Path) -> None:
    """Writes a corpus of documents with 1 to 1000 ids of nine digits."""
    lengths = np.random.default_rng(1).integers(1, 1000, 2000).tolist()
    path.write_text("".join(json.dumps({"text": " ".join(["123456789"] * length)}) + "\n" for length in lengths))


def measure(kind: Kind, folder: Path, args: argparse.Namespace) -> Result:
    """Runs all ways in turns. The slow ones read only the first part of the corpus."""
    result = Result(kind.name)
    part = first_part(folder, int(args.package_megabytes * 1e6))
    for number in range(args.rounds):
        # The order alternates.
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            source = part if way == "package" else folder / "corpus.jsonl"
            if way != "before" or args.before is not None:
                result.add(way, source.stat().st_size / 1e6, run_way(way, kind, source, folder / f"out_{way}", args.before))
        print(f"{kind.name}: {', '.join(f'{way} {result.rate(way):.1f} MB/s' for way in WAYS)}", file=sys.stderr, flush=True)
    if args.before is not None:
        check_same(folder / "out_before", folder / "out_tool")
    part.unlink()
    return result


def run_way(way: str, kind: Kind, source: Path, prefix: Path, before: Path | None) -> float:
    """The CPU seconds of one way. A loop counts from after the start of its interpreter, the tool with it."""
    if way in LOOPS:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(LOOPS[way], (kind, source, prefix))
    if way == "package":
        return run_package(kind, source, prefix)
    flags = ["--input", str(source), "--output-prefix", str(prefix), "--append-eod", "--workers", "1", *kind.flags]
    root = ROOT if way == "tool" or before is None else before
    began = os.times()
    subprocess.run([sys.executable, str(root / "tools" / "preprocess_data.py"), *flags], check=True, capture_output=True)
    ended = os.times()
    return ended.children_user + ended.children_system - began.children_user - began.children_system


def run_library(kind: Kind, source: Path, prefix: Path) -> float:
    """The fastest library alone: a list of texts in memory becomes arrays of ids."""
    texts = [json.loads(line)["text"] for line in source.read_bytes().splitlines()]
    encode = _library_encode(kind.tokenizer())
    began = _cpu_seconds()
    for text in texts:
        encode(text)
    return _cpu_seconds() - began


def run_loop(kind: Kind, source: Path, prefix: Path) -> float:
    """A plain loop over the fastest library: reads, parses and encodes line by line, and writes all ids at the end."""
    tokenizer, documents = kind.tokenizer(), []
    encode = _library_encode(tokenizer)
    began = _cpu_seconds()
    with open(source, encoding="utf-8") as lines:
        for line in lines:
            documents.append(np.append(encode(json.loads(line)["text"]), tokenizer.eod).astype(np.uint16))
    np.concatenate(documents).tofile(f"{prefix}.plain")
    return _cpu_seconds() - began


def run_package(kind: Kind, source: Path, prefix: Path) -> float:
    """A loop like that of Megatron's tool over the package that defines the ids, with one worker.

    The worker parses and encodes a line, and sends a list of ids; this process makes an array of every document and writes it.
    """
    began = os.times()
    with (
        open(source, encoding="utf-8") as lines,
        open(f"{prefix}.plain", "wb") as file,
        multiprocessing.get_context("fork").Pool(1, _start_worker, (kind,)) as pool,
    ):
        for ids in pool.imap(_encode_line, lines, MEGATRON_CHUNK):
            file.write(np.array(ids, dtype=np.uint16).tobytes())
        pool.close()
        pool.join()
    ended = os.times()
    return sum(ended[:4]) - sum(began[:4])


WAYS = ("library", "loop", "package", "before", "tool")
LOOPS = {"library": run_library, "loop": run_loop}
_of_worker: list[Tokenizer] = []


def _start_worker(kind: Kind) -> None:
    _of_worker.append(kind.tokenizer())


def _encode_line(line: str) -> list[int]:
    tokenizer = _of_worker[0]
    return [*tokenizer.tokenize(json.loads(line)["text"]), tokenizer.eod]


def _library_encode(tokenizer: Tokenizer) -> Callable[[str], np.ndarray]:
    description = tokenizer.prepare_batches()
    if not isinstance(tokenizer, BatchTokenizer) or tokenizer._batch_encoder is None or tokenizer._batch_encoder.fast is None:
        raise RuntimeError(description)
    encode: Callable[[str], np.ndarray] = tokenizer._batch_encoder.fast._encoder.encode
    return encode


def check_same(before: Path, after: Path) -> None:
    for ending in ("bin", "idx"):
        one, other = (Path(f"{prefix}_text_document.{ending}").read_bytes() for prefix in (before, after))
        if one != other:
            raise RuntimeError(f"{before} and {after} differ in .{ending}")


def measure_memory(kind: Kind, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Peak megabytes of all processes of the tool together, for each number of megabytes of input."""
    peaks = {}
    for megabytes in args.memory_megabytes:
        path = first_part(folder, int(megabytes * 1e6))
        flags = [*kind.flags, "--workers", str(args.workers), "--input", str(path), "--output-prefix", str(folder / "memory")]
        command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *flags]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            peaks[f"{megabytes:g}"] = _peak_megabytes(process)
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        print(f"{kind.name}, {megabytes:g} MB: {peaks[f'{megabytes:g}']:.0f} MB of memory at most", file=sys.stderr, flush=True)
        path.unlink()
    return peaks


def first_part(folder: Path, most_bytes: int) -> Path:
    """A file with the corpus's lines, repeated as needed, of most_bytes or a little more."""
    lines = (folder / "corpus.jsonl").read_bytes().splitlines(keepends=True)
    path = folder / f"part{most_bytes}.jsonl"
    with open(path, "wb") as file:
        for line in cycle(lines):
            file.write(line)
            if file.tell() >= most_bytes:
                return path
    return path


def speed_table(results: Sequence[Result]) -> str:
    if not results:
        return ""
    columns = "tokenizer,library alone,plain loop,as Megatron's tool,before,tool,tool / library,tool / as Megatron's,tool / before"
    return "\n".join([f"| {columns.replace(',', ' | ')} |", "|---|" + "---:|" * 8, *map(_speed_row, results)])


def _speed_row(result: Result) -> str:
    rates = [result.rate(way) for way in WAYS]
    ratios = [rates[-1] / result.rate(way) for way in ("library", "package", "before")]
    return f"| {result.tokenizer} | {' | '.join(f'{rate:.1f}' for rate in rates)} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"


def memory_table(peaks: dict[str, float]) -> str:
    if not peaks:
        return ""
    rows = [f"| {megabytes} | {peak:.0f} |" for megabytes, peak in peaks.items()]
    ratio = max(peaks.values()) / min(peaks.values())
    return "\n".join(["| MB of input | MB of memory |", "|---:|---:|", *rows]) + f"\n\nLargest over smallest: {ratio:.3f}"


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


def _text_of(path: Path) -> str:
    """The file's text; empty if it is too large, or not text."""
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= LARGEST_FILE_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("GPT-2 BPE", "Hugging Face", "SentencePiece")
    paths = [sysconfig.get_path(name) for name in ("stdlib", "purelib")]
    parser.add_argument(
        "--texts", nargs="+", default=[*paths, "/usr/lib", "/usr/share"], help="folders with the text (default: of Python, /usr)"
    )
    parser.add_argument("--megabytes", type=float, default=100, help="of JSON lines to tokenise, 0 for none (default: 100)")
    parser.add_argument("--package-megabytes", type=float, default=20, help="for the loop as Megatron's (default: 20)")
    parser.add_argument("--before", type=Path, help="a checkout of another commit, whose tool must write the same bytes")
    parser.add_argument("--rounds", type=int, default=2, help="how often each way runs (default: 2)")
    parser.add_argument("--tokenizers", nargs="+", choices=names, default=list(names), help="(default: all)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="for memory (default: one per core)")
    parser.add_argument("--memory-megabytes", type=float, nargs="+", help="measure peak memory at these sizes of input")
    parser.add_argument("--memory-tokenizer", choices=(*names, IDS.name), default="GPT-2 BPE", help="(default: GPT-2 BPE)")
    parser.add_argument("--folder", help="where the corpus is put for the time of the run (default: the system's)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "preprocess.json")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
