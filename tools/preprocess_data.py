"""Text to tokens: JSON lines in, PREFIX_KEY_document.bin and .idx out (Megatron's flags, names and format)."""

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command import MISTAKE_EXIT_CODE, run_command

from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter, best_dtype
from megatron_zpp.data.tokenizer import Tokenizer, build_tokenizer

BATCH_BYTES = 1 << 20
# Batches under way per worker: enough to keep it busy, few enough to bound memory when the disk is the slowest part.
BATCHES_PER_WORKER = 4


class LineBatch(NamedTuple):
    first_line: int  # counted from 1
    lines: list[bytes]


class Documents(NamedTuple):
    tokens: np.ndarray  # [sum of lengths], one document behind the other
    lengths: np.ndarray  # [documents] int32
    empty_count: int


class EncodedBatch(NamedTuple):
    documents: dict[str, Documents]  # by JSON key
    line_count: int
    text_bytes: int


@dataclass(frozen=True)
class Encoder:
    """Tokenises lines of one file. Every error names the file and the line."""

    path: str
    keys: tuple[str, ...]
    tokenizer: Tokenizer
    append_eod: bool

    def encode(self, batch: LineBatch) -> EncodedBatch:
        ids: dict[str, list[list[int]]] = {key: [] for key in self.keys}
        for number, line in enumerate(batch.lines, batch.first_line):
            if line.isspace():
                continue
            try:
                self._encode_line(line, ids)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from None
        documents = {key: self._gather(ids[key]) for key in self.keys}
        return EncodedBatch(documents, len(batch.lines), sum(map(len, batch.lines)))

    def _encode_line(self, line: bytes, ids: dict[str, list[list[int]]]) -> None:
        for key, text in _read_texts(line, self.keys).items():
            tokens = self.tokenizer.tokenize(text)
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.tokenizer.vocab_size:
                raise ValueError(f"token id {max(tokens)} is outside of the vocabulary of {self.tokenizer.vocab_size} ids")
            ids[key].append([*tokens, self.tokenizer.eod] if tokens and self.append_eod else tokens)

    def _gather(self, documents: list[list[int]]) -> Documents:
        dtype = best_dtype(self.tokenizer.vocab_size)
        filled = [np.array(document, dtype=dtype) for document in documents if document]
        lengths = np.array([len(document) for document in filled], dtype=np.int32)
        return Documents(np.concatenate([np.empty(0, dtype), *filled]), lengths, len(documents) - len(filled))


# A worker process gets its encoder once: sending the tokenizer along with each batch would cost more than the text.
_worker_encoder: list[Encoder] = []


def main() -> None:
    parser = _parser()
    try:
        run_command(parser, run)
    except BrokenProcessPool:
        message = "a worker process was ended from outside, perhaps for memory; give fewer --workers."
        parser.exit(MISTAKE_EXIT_CODE, f"{parser.prog}: error: {message}\n")


def run(args: argparse.Namespace) -> None:
    """Writes the pairs of files of all keys, or none. Raises ValueError for flags or lines that are not right."""
    _check(args)
    encoder = Encoder(args.input, tuple(args.json_keys), build_tokenizer(_data_config(args)), args.append_eod)
    dtype = best_dtype(encoder.tokenizer.vocab_size)
    started = time.monotonic()
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writers = {key: stack.enter_context(IndexedDatasetWriter(f"{args.output_prefix}_{key}_document", dtype)) for key in args.json_keys}
        progress = stack.enter_context(Progress(os.path.getsize(args.input), args.log_interval))
        empty_counts = write_documents(encoder, args.workers, writers, progress)
        if not any(writer.document_count for writer in writers.values()):
            raise ValueError(f"--input {args.input} holds no document with text; nothing was written.")
        for writer in writers.values():
            writer.finalize()
    for key, writer in writers.items():
        print(report(writer, empty_counts[key]))
    print(f"{os.path.getsize(args.input) / 1e6:.1f} MB of JSON lines in {time.monotonic() - started:.1f} s")


def write_documents(encoder: Encoder, workers: int, writers: dict[str, IndexedDatasetWriter], progress: "Progress") -> dict[str, int]:
    """The number of empty documents of each key, which are left out; the others go to the key's writer, in the order of the lines."""
    empty_counts = dict.fromkeys(writers, 0)
    for batch in encoded_batches(encoder, workers):
        for key, documents in batch.documents.items():
            writers[key].add_documents(documents.tokens, documents.lengths)
            empty_counts[key] += documents.empty_count
        progress.advance(batch.line_count, batch.text_bytes)
    return empty_counts


def encoded_batches(encoder: Encoder, workers: int) -> Iterator[EncodedBatch]:
    """The encoded batches of the encoder's file, in the order of its lines."""
    with open(encoder.path, "rb") as file:
        if workers == 1:
            yield from map(encoder.encode, line_batches(file))
            return
        with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(encoder,)) as pool:
            under_way: deque[Future[EncodedBatch]] = deque()
            for batch in line_batches(file):
                under_way.append(pool.submit(_encode_in_worker, batch))
                if len(under_way) == workers * BATCHES_PER_WORKER:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()


def line_batches(lines: Iterable[bytes]) -> Iterator[LineBatch]:
    """Consecutive lines, about BATCH_BYTES at a time."""
    first_line, batch, batch_bytes = 1, [], 0
    for line in lines:
        batch.append(line)
        batch_bytes += len(line)
        if batch_bytes >= BATCH_BYTES:
            yield LineBatch(first_line, batch)
            first_line, batch, batch_bytes = first_line + len(batch), [], 0
    if batch:
        yield LineBatch(first_line, batch)


def report(writer: IndexedDatasetWriter, empty_count: int) -> str:
    """One sentence about a finished pair of files."""
    token_bytes, index_bytes = (os.path.getsize(f"{writer.prefix}.{ending}") for ending in ("bin", "idx"))
    return (
        f"{writer.prefix}: {writer.document_count} documents, {writer.token_count} tokens ({writer.dtype.name}), "
        f"{empty_count} empty documents skipped, {token_bytes} bytes in .bin, {index_bytes} bytes in .idx"
    )


class Progress:
    """A bar on a terminal, else a line per log_interval documents; both with documents and megabytes per second."""

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        self.log_interval = log_interval
        self.bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=None)
        self.started = time.monotonic()
        self.line_count = 0
        self.text_bytes = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def advance(self, line_count: int, text_bytes: int) -> None:
        is_due = (self.line_count + line_count) // self.log_interval > self.line_count // self.log_interval
        self.line_count += line_count
        self.text_bytes += text_bytes
        seconds = max(time.monotonic() - self.started, 1e-9)
        self.bar.set_postfix_str(f"{self.line_count / seconds:.0f} docs/s")
        self.bar.update(text_bytes)
        if self.bar.disable and is_due:
            rates = f"{self.line_count / seconds:.0f} docs/s, {self.text_bytes / seconds / 1e6:.2f} MB/s"
            print(f"Processed {self.line_count} documents ({rates}).", file=sys.stderr, flush=True)


def _start_worker(encoder: Encoder) -> None:
    _worker_encoder.append(encoder)


def _encode_in_worker(batch: LineBatch) -> EncodedBatch:
    return _worker_encoder[0].encode(batch)


def _read_texts(line: bytes, keys: tuple[str, ...]) -> dict[str, str]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); every line needs one object") from None
    if not isinstance(record, dict):
        raise ValueError(f"holds {type(record).__name__}, needed is a JSON object")
    return {key: _read_text(record, key) for key in keys}


def _read_text(record: dict[str, object], key: str) -> str:
    if key not in record:
        raise ValueError(f'key "{key}" is missing (found: {", ".join(record) or "none"}); --json-keys names the keys to read')
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f'key "{key}" holds {type(text).__name__}, needed is a string')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f'key "{key}" holds half of a surrogate pair, which is no text') from None
    return text


def _check(args: argparse.Namespace) -> None:
    if not os.path.isfile(args.input):
        raise ValueError(f"--input {args.input} is not a file; give one file of JSON lines.")
    if args.partitions != 1:
        raise ValueError(f"--partitions {args.partitions} is not supported; leave it out, --workers share one file.")
    if args.workers < 1 or args.log_interval < 1:
        raise ValueError(f"--workers {args.workers} and --log-interval {args.log_interval} must be 1 or more.")
    if len(set(args.json_keys)) < len(args.json_keys):
        raise ValueError(f"--json-keys {' '.join(args.json_keys)} names a key twice; name each once.")


def _data_config(args: argparse.Namespace) -> DataConfig:
    return DataConfig(tokenizer_type=args.tokenizer_type, tokenizer_model=args.tokenizer_model, vocab_size=args.vocab_size)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="preprocess_data.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", required=True, help="file of JSON lines, one document each")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys to tokenise, each into files of its own (default: text)")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--output-prefix", required=True, help="files are named PREFIX_KEY_document.bin and .idx")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that tokenise (default: one per CPU)")
    parser.add_argument("--partitions", type=int, default=1, help="accepted for Megatron's scripts, only as 1")
    parser.add_argument("--log-interval", type=int, default=1000, help="documents between two lines of progress (default: 1000)")
    kinds = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "NullTokenizer")
    parser.add_argument("--tokenizer-type", required=True, choices=kinds)
    parser.add_argument("--tokenizer-model", help="SentencePiece .model file")
    parser.add_argument("--vocab-size", type=int, help="number of ids of NullTokenizer")
    return parser


if __name__ == "__main__":
    main()
