"""Tokenises JSON lines into PREFIX_KEY_document.bin and .idx, with Megatron's flags, names and format."""

import argparse
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NoReturn

from cli.command import add_line_limit, count_from_1, in_words, process_count, run_command
from cli.tokenizer_flags import add_tokenizer_flags, tokenizer_config, tokenizer_identity
from preprocessing.progress import ProgressBar
from preprocessing.worker_count import find_worker_count

from megatron_zpp.config.counted import counted
from megatron_zpp.data.indexed_dataset import IndexedDataset, best_dtype
from megatron_zpp.data.preprocess.corpus_builder import CorpusBuilder, describe
from megatron_zpp.data.preprocess.document_encoder import DocumentEncoder
from megatron_zpp.data.preprocess.encoding_workers import encoded_batches
from megatron_zpp.data.preprocess.journal import Journal, Progress, input_files
from megatron_zpp.data.preprocess.json_lines import STANDARD_INPUT, DamagedInput, find_inputs, line_batches
from megatron_zpp.data.tokenizers.tokenizer import build_tokenizer
from megatron_zpp.system.user_error import UserError

KILLED_WORKER = "a worker process was ended from outside, perhaps for memory; give fewer --workers"


@dataclass(frozen=True)
class Job:
    """One preprocessing job, as the flags describe it."""

    paths: list[str]
    encoder: DocumentEncoder
    journal: Journal
    workers: int
    skips_invalid: bool
    longest_line_bytes: int
    log_interval: int
    journal_seconds: float


def main() -> None:
    # The worker processes already use all cores, so threads of package tokenizers would only compete with them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, _interrupt)
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes the pairs of files for all keys, or for none. Raises UserError for wrong flags or lines."""
    _check(args)
    if args.list_inputs:
        _list_inputs(args.input)
        return
    job = _job(args)
    print(f"Text to ids: {job.encoder.tokenizer.prepare_batches()}", flush=True)
    if args.find_optimal_num_workers:
        find_worker_count(job.encoder, job.paths, args.workers_to_check, args.max_documents, args.longest_line_bytes)
        return
    start = _start(job, args.resume, args.restart_if_changed)
    if not job.journal.path.parent.is_dir():
        job.journal.path.parent.mkdir(parents=True)
    dtype = best_dtype(job.encoder.tokenizer.vocab_size)
    builder = CorpusBuilder(job.journal, job.encoder.keys, dtype, job.journal_seconds, start)
    if not builder.progress.is_complete:
        print(end="".join(f"{replaced}\n" for prefix in builder.prefixes.values() for replaced in _replaced(prefix)), flush=True)
    began = time.monotonic()
    try:
        write_documents(job, builder)
        if not args.share and not any(extent.sequence_count for extent in builder.progress.extents.values()):
            raise NothingToWrite(f"--input {' '.join(args.input)} holds no document with text: {_why_empty(builder)}")
        builder.finish()
    except NothingToWrite:
        builder.discard()
        raise
    except BaseException as error:
        _stop(job, builder, error)
    _report(builder, dtype.name, time.monotonic() - began, (start or Progress()).text_bytes)
    if not args.append_eod:
        print("No document got an end-of-document token; give --append-eod if the model shall learn where a text ends.")


class NothingToWrite(UserError):
    """The input contains no text."""


class InvalidLine(UserError):
    """A line is not a document, and invalid lines are not skipped."""


def write_documents(job: Job, builder: CorpusBuilder) -> None:
    """Adds all documents after the builder's position to it. Raises InvalidLine for the first bad line, unless such lines are skipped."""
    start = builder.progress
    if start.is_complete:
        return
    sizes = [file.file_bytes for file in job.journal.inputs]
    bytes_before = [0, *accumulate(sizes)]
    batches = encoded_batches(job.encoder, line_batches(job.paths, start.position, job.longest_line_bytes), job.workers)
    total_bytes = None if STANDARD_INPUT in job.paths else sum(sizes)
    with closing(batches), ProgressBar(total_bytes, start.file_bytes, job.log_interval) as bar:
        for batch, encoded in batches:
            path = job.paths[batch.source]
            if encoded.bad_lines and not job.skips_invalid:
                position = builder.progress.position
                first_line = position.line if batch.source == position.source else 0
                raise InvalidLine(f"{describe(encoded.bad_lines[0], path, first_line)} (--skip-invalid leaves such lines out)")
            builder.add(batch, encoded, path, bytes_before[batch.source] + batch.file_bytes)
            bar.advance(encoded.line_count, encoded.text_bytes, builder.progress.file_bytes)


def _job(args: argparse.Namespace) -> Job:
    paths = find_inputs(args.input, print)
    if args.tokenizer_type is None and args.vocab_file is not None and args.merge_file is not None:
        args.tokenizer_type = "GPT2BPETokenizer"
    data = tokenizer_config(args)
    tokenizer = build_tokenizer(data)
    settings = {"json_keys": args.json_keys, "append_eod": args.append_eod, **tokenizer_identity(data)}
    if args.resume and STANDARD_INPUT in paths:
        raise UserError("--resume cannot read standard input again; give files to --input.")
    return Job(
        paths=paths,
        encoder=DocumentEncoder(tuple(args.json_keys), tokenizer, args.append_eod),
        journal=Journal(args.output_prefix, input_files(paths), settings, args.share),
        workers=args.workers,
        skips_invalid=args.skip_invalid,
        longest_line_bytes=args.longest_line_bytes,
        log_interval=args.log_interval,
        # Reading of standard input cannot be resumed, so its progress is not saved.
        journal_seconds=math.inf if STANDARD_INPUT in paths else args.journal_interval,
    )


def _list_inputs(words: list[str]) -> None:
    paths = find_inputs(words, partial(print, file=sys.stderr))
    sys.stdout.buffer.write(b"".join(os.fsencode(path) + b"\0" for path in paths))


def _start(job: Job, resumes: bool, restarts_if_changed: bool) -> Progress | None:
    journal = job.journal
    if resumes:
        try:
            start = _earlier_progress(job)
        except UserError as refusal:
            if not restarts_if_changed:
                raise
            print(f"{refusal} --restart-if-changed: starting at the beginning.", flush=True)
            return None
        print(f"--resume: {_in_words(start, journal.prefix)}", flush=True)
        return start
    if journal.path.exists():
        raise UserError(f"{journal.prefix} has an unfinished run; give --resume to continue it, or remove {journal.path} to start anew.")
    return None


def _earlier_progress(job: Job) -> Progress | None:
    """The progress that the journal has. Raises UserError if it is not that of this command."""
    start = job.journal.load()
    if job.journal.is_share and start is not None and start.skipped_lines and not job.skips_invalid:
        left_out = f"{counted(start.skipped_lines, 'invalid line')} of {job.journal.prefix} left out"
        raise UserError(f"--resume: the earlier run had {left_out}; give --skip-invalid, or {job.journal.remedy}")
    return start


def _in_words(start: Progress | None, prefix: str) -> str:
    if start is None:
        return f"no unfinished run of {prefix}; starting at the beginning."
    if start.is_complete:
        return f"{prefix} was done before."
    done = sum(extent.document_count for extent in start.extents.values()) // len(start.extents)
    return f"going on after {counted(done, 'document')}, {start.text_bytes / 1e6:.1f} MB of text."


def _replaced(prefix: str) -> Iterator[str]:
    """A line about the corpus that has this prefix now, if there is one."""
    if not os.path.exists(f"{prefix}.bin") or not os.path.exists(f"{prefix}.idx"):
        return
    try:
        yield f"replaces {prefix} ({counted(len(IndexedDataset(prefix).document_starts) - 1, 'document')})"
    except (ValueError, OSError):
        yield f"replaces {prefix}, which cannot be read"


def _stop(job: Job, builder: CorpusBuilder, error: BaseException) -> NoReturn:
    """Stops the builder and raises the error, with a hint on how to continue."""
    if STANDARD_INPUT in job.paths:
        builder.discard()
        can_resume = False
    else:
        can_resume = builder.stop()
    hint = "; the same command with --resume continues from there." if can_resume else ""
    if can_resume and isinstance(error, InvalidLine):
        hint = "; with --resume and --skip-invalid the same command continues from there."
    if can_resume and isinstance(error, DamagedInput) and error.source <= builder.progress.position.source:
        # The output already has text of the damaged file, so the run cannot be resumed with another file in its place.
        hint = f"; {job.journal.remedy}"
    if isinstance(error, KeyboardInterrupt):
        raise KeyboardInterrupt(hint) from None
    if isinstance(error, BrokenProcessPool):
        raise UserError(f"{KILLED_WORKER}{hint or '.'}") from None
    if can_resume and isinstance(error, UserError | OSError):
        raise UserError(f"{in_words(error).rstrip('.')}{hint}") from error
    raise error


def _why_empty(builder: CorpusBuilder) -> str:
    count = builder.progress.skipped_lines
    if count:
        return f"{counted(count, 'line is', 'lines are')} invalid, the first is {builder.first_skipped_line()}; nothing was written."
    if not builder.progress.text_bytes:
        return "there is not one line in it; nothing was written."
    keys = " ".join(builder.prefixes)
    return f"what lies under --json-keys {keys} is empty; name the keys that hold the text, nothing was written."


def _report(builder: CorpusBuilder, dtype: str, seconds: float, earlier_bytes: int) -> None:
    progress, written_bytes = builder.progress, 0
    for key, prefix in builder.prefixes.items():
        tokens, sequences, documents = progress.extents[key]
        token_bytes, index_bytes = (os.path.getsize(f"{prefix}.{ending}") for ending in ("bin", "idx"))
        written_bytes += token_bytes + index_bytes
        print(
            f"{prefix}: {counted(documents, 'document')} ({documents - sequences} of them empty), {counted(tokens, 'token')} ({dtype}), "
            f"{token_bytes} bytes in .bin, {index_bytes} bytes in .idx"
        )
    if progress.skipped_lines:
        print(f"{counted(progress.skipped_lines, 'invalid line')} skipped, listed in {builder.skipped_list_path}")
    tokens = sum(extent.token_count for extent in progress.extents.values())
    print(
        f"{progress.text_bytes / 1e6:.1f} MB of JSON lines ({progress.text_bytes / max(tokens, 1):.2f} bytes per token, "
        f"{written_bytes / max(progress.text_bytes, 1):.3f} bytes written per byte read) "
        f"in {seconds:.1f} s: {(progress.text_bytes - earlier_bytes) / 1e6 / max(seconds, 1e-9):.2f} MB/s"
    )


def _interrupt(*_: object) -> NoReturn:
    if multiprocessing.parent_process() is not None:
        os._exit(1)  # a worker that has not yet reset its signals; only the first process prints
    raise KeyboardInterrupt


def _check(args: argparse.Namespace) -> None:
    if args.split_sentences:
        raise UserError("--split-sentences is not available: GPT reads documents, not sentences; leave it out.")
    if args.find_optimal_num_workers and STANDARD_INPUT in args.input:
        raise UserError("--find-optimal-num-workers reads its input several times, --input - can be read only once; give files.")
    if not args.output_prefix:
        raise UserError("--output-prefix is empty; give the path with which the names of the files begin.")
    if args.restart_if_changed and not args.resume:
        raise UserError("--restart-if-changed changes nothing without --resume; give that as well.")
    if not args.journal_interval >= 0:
        raise UserError(f"--journal-interval {args.journal_interval:g} must be 0 or more.")
    if len(set(args.json_keys)) < len(args.json_keys):
        raise UserError(f"--json-keys {' '.join(args.json_keys)} names a key twice; name each once.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="preprocess_data.py", description=__doc__, allow_abbrev=False)
    text = parser.add_argument_group("input")
    text.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="JSON lines, plain, .gz or .zst: files, globs, folders, or - for stdin"
    )
    text.add_argument(
        "--list-inputs", action="store_true", help="write nothing: print the names of the input files, a zero byte after each"
    )
    text.add_argument(
        "--json-keys", "--json-key", nargs="+", default=["text"], help="keys to tokenise, each into files of its own (default: text)"
    )
    text.add_argument("--skip-invalid", action="store_true", help="leave out lines that are not documents, and list them in a file")
    add_line_limit(text)
    text.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, help="files are named PREFIX_KEY_document.bin and .idx")
    output.add_argument("--resume", action="store_true", help="continue an interrupted run of this prefix, if there is one")
    output.add_argument(
        "--restart-if-changed", action="store_true", help="with --resume: where input or flags have changed, start at the beginning"
    )
    output.add_argument(
        "--share", action="store_true", help="of a larger corpus: may hold no text, and with --resume it is not repeated once it is done"
    )
    output.add_argument("--journal-interval", type=float, default=30, metavar="SECONDS", help="work lost at most (default: 30)")
    output.add_argument("--log-interval", type=count_from_1, default=1000, help="documents between two lines of progress (default: 1000)")
    workers = parser.add_argument_group("workers")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers.add_argument("--workers", type=process_count, default=cores, help="processes that tokenise (default: one per core)")
    workers.add_argument(
        "--find-optimal-num-workers", action="store_true", help="write nothing: try --workers-to-check and say which is best"
    )
    workers.add_argument("--workers-to-check", type=process_count, nargs="+", default=[16, 32, 64], help="(default: 16 32 64)")
    workers.add_argument("--max-documents", type=count_from_1, default=100_000, help="documents to try each with (default: 100000)")
    add_tokenizer_flags(parser)
    accepted = parser.add_argument_group("other flags of Megatron's scripts, without effect or refused")
    accepted.add_argument("--partitions", type=count_from_1, default=1, help="all workers share all files")
    accepted.add_argument("--keep-sequential-samples", action="store_true", help="documents always keep their order")
    accepted.add_argument("--split-sentences", action="store_true", help="refused: GPT reads documents")
    accepted.add_argument("--keep-newlines", action="store_true", help="text is never changed")
    for flag in ("--lang", "--dataset-impl", "--seq-length", "--performance-dir", "--make-vocab-size-divisible-by"):
        accepted.add_argument(flag, metavar="VALUE", help="not needed here")
    return parser


if __name__ == "__main__":
    main()
