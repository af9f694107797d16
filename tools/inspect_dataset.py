"""Prints header, counts, lengths and sample documents of a tokenised corpus, and checks that its .idx and .bin fit together."""

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace

from cli.command import count_from_0, count_from_1, run_command  # first, so that Ctrl-C ends what follows in one line

# isort: split

import numpy as np
from cli.tokenizer_flags import add_tokenizer_flags, tokenizer_config

from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.indexed_dataset import CODES, INDEX_CHUNK_NUMEL, VERSION, IndexedDataset, check_token_ids, chunks_of
from megatron_zpp.data.stored_array import Rows
from megatron_zpp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.kept_rules import has_earlier_ends

BAR_COLUMNS = 50

SUFFIXES = (".png", ".svg")


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Prints the report. Raises UserError for files that do not fit together, and for ids outside of a given vocabulary."""
    if args.histogram_png and not args.histogram_png.lower().endswith(SUFFIXES):
        raise UserError(f"--histogram-png {args.histogram_png} is neither a PNG nor an SVG file; give a name that ends in .png or .svg.")
    tokenizer = _tokenizer_of(replace(tokenizer_config(args), data_path=(args.data_path,))) if args.tokenizer_type else None
    dataset = IndexedDataset(args.data_path)
    print(header(dataset))
    histogram = length_histogram(dataset)
    print(f"\n{histogram_text(histogram)}")
    if args.histogram_png:
        draw_histogram(histogram, args.histogram_png)
        print(f"\n{args.histogram_png}: the same as a picture")
    for sequence in sample_places(len(dataset), args.num_samples):
        print(f"\nsequence {sequence}: {sample_text(dataset, sequence, args.sample_tokens, tokenizer)}")
    print(f"\nintact: {dataset.index_path} describes {dataset.token_path} to the last byte")
    vocab_size = args.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    if vocab_size is not None:
        check_token_ids(dataset, vocab_size)
        print(f"intact: every token id is below {vocab_size}")


def _tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer that the flags name, in the form that the corpus was written with."""
    return build_tokenizer(replace(data, legacy_tokenizer=data.legacy_tokenizer or has_earlier_ends(data)))


def header(dataset: IndexedDataset) -> str:
    """Format and counts, one per line."""
    documents = len(dataset.document_starts) - 1
    empty = sum(int((starts[1:] == starts[:-1]).sum()) for starts in _overlapping_chunks(dataset.document_starts))
    rows = {
        "format": f"MMIDIDX, version {VERSION}",
        "token ids": f"{dataset.dtype.name} (code {CODES[dataset.dtype]})",
        "documents": f"{documents} ({empty} of them empty)",
        "sequences": f"{len(dataset)}",
        "tokens": f"{dataset.token_count}",
        "bytes": f"{os.path.getsize(dataset.token_path)} in .bin, {os.path.getsize(dataset.index_path)} in .idx",
    }
    if len(dataset):
        least, most = min(map(np.min, chunks_of(dataset.lengths))), max(map(np.max, chunks_of(dataset.lengths)))
        rows["lengths"] = f"{least} to {most}, mean {dataset.token_count / len(dataset):.1f} tokens"
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items())


def length_histogram(dataset: IndexedDataset) -> list[int]:
    """How many sequences have 0 tokens, 1, 2 to 3, 4 to 7, ...: one number per power of two."""
    counts = np.zeros(33, dtype=np.int64)
    for lengths in chunks_of(dataset.lengths):
        # frexp's exponent of n is the number of bits of n.
        counts += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=33)
    filled = np.flatnonzero(counts)
    return counts[: int(filled[-1]) + 1].tolist() if len(filled) else []


def histogram_text(histogram: list[int]) -> str:
    """One line per power of two, with a bar for the number of sequences."""
    if not histogram:
        return "no sequence"
    most = max(histogram)
    lines = [f"{'tokens':>23}  sequences"]
    for bits, count in enumerate(histogram):
        bar = "#" * -(-count * BAR_COLUMNS // most)
        lines.append(f"{_range_of(bits):>23}  {count:<9} {bar}".rstrip())
    return "\n".join(lines)


def draw_histogram(histogram: list[int], path: str) -> None:
    """Writes the histogram as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    axes.bar([_range_of(bits) for bits in range(len(histogram))], histogram)
    axes.set_xlabel("tokens")
    axes.set_ylabel("sequences")
    axes.tick_params(axis="x", labelrotation=60)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def sample_places(count: int, wanted: int) -> list[int]:
    """Up to `wanted` sequences, spread evenly from the first to the last."""
    return sorted(set(np.linspace(0, count - 1, min(wanted, count), dtype=np.int64).tolist())) if count else []


def sample_text(dataset: IndexedDataset, sequence: int, tokens: int, tokenizer: Tokenizer | None) -> str:
    """The beginning of a sequence as text, or as ids without a tokenizer."""
    ids = dataset.read(sequence, 0, tokens).tolist()
    length = int(dataset.lengths[sequence])
    text = " ".join(map(str, ids)) if tokenizer is None else repr(tokenizer.detokenize(ids))
    return f"{length} tokens: {text}{' ...' if length > len(ids) else ''}"


def _range_of(bits: int) -> str:
    if bits < 2:
        return str(bits)
    return f"{1 << (bits - 1)} to {(1 << bits) - 1}"


def _overlapping_chunks(values: Rows) -> Iterator[np.ndarray]:
    return (values[start : start + INDEX_CHUNK_NUMEL + 1] for start in range(0, len(values) - 1, INDEX_CHUNK_NUMEL))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inspect_dataset.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--data-path", required=True, metavar="PREFIX", help="common prefix of the .bin and the .idx file")
    parser.add_argument("--num-samples", type=count_from_0, default=3, metavar="N", help="sequences to show (default: 3)")
    parser.add_argument("--sample-tokens", type=count_from_1, default=50, metavar="N", help="tokens of each to show (default: 50)")
    parser.add_argument("--histogram-png", metavar="PATH", help="draw the histogram of lengths as well")
    add_tokenizer_flags(parser)
    return parser


if __name__ == "__main__":
    main()
