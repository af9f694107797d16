"""Merges tokenised corpora into one: all pairs of .bin and .idx in a folder, or the named ones, one after the other."""

import argparse
import os
import time
from pathlib import Path

from cli.command import run_command

from megatron_zpp.config.counted import counted
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.preprocess.indexed_writer import IndexedDatasetWriter
from megatron_zpp.data.preprocess.journal import pair_prefix, read_finished_share
from megatron_zpp.system.user_error import UserError


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes the merged corpus, or that of every key of shares."""
    if args.multimodal:
        raise UserError("--multimodal is not available: corpora hold only text; leave it out.")
    if not args.shares:
        merge(args.input, args.output_prefix)
        return
    for key in keys_of_shares(args.input):
        merge([pair_prefix(share, key) for share in args.input], pair_prefix(args.output_prefix, key))


def merge(words: list[str], output_prefix: str) -> None:
    """Writes OUTPUT_PREFIX.bin and .idx. Raises UserError for a damaged corpus, and for token ids of different dtypes."""
    began = time.monotonic()
    prefixes = find_prefixes(words, output_prefix)
    # All corpora are checked before anything is written. Each is closed again, because there may be thousands.
    dtypes = {prefix: IndexedDataset(prefix).dtype for prefix in prefixes}
    for prefix, dtype in dtypes.items():
        if dtype != dtypes[prefixes[0]]:
            raise UserError(
                f"{prefix}.bin holds {dtype.name}, {prefixes[0]}.bin {dtypes[prefixes[0]].name}; "
                "merge only corpora that were tokenised with one vocabulary."
            )
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with IndexedDatasetWriter(output_prefix, dtypes[prefixes[0]]) as writer:
        for prefix in prefixes:
            before = writer.extent
            writer.add_dataset(IndexedDataset(prefix))
            documents = counted(writer.document_count - before.document_count, "document")
            print(f"{prefix}: {documents}, {counted(writer.token_count - before.token_count, 'token')}", flush=True)
        writer.finalize()
    merged = f"{counted(writer.document_count, 'document')}, {counted(writer.token_count, 'token')}"
    print(f"{output_prefix}: {merged} of {counted(len(prefixes), 'corpus', 'corpora')} in {time.monotonic() - began:.1f} s")


def keys_of_shares(shares: list[str]) -> list[str]:
    """The JSON keys of the shares. Raises UserError if the shares were not made with the same settings, or if none of them has text."""
    records = [read_finished_share(share) for share in shares]
    for share, record in zip(shares, records, strict=True):
        if record.settings != records[0].settings:
            raise UserError(
                f"{share} was made with another tokenizer or other flags than {shares[0]}; make all shares again with one command, "
                "which repeats only what has changed."
            )
    keys = list(records[0].extents)
    if not any(extent.sequence_count for record in records for extent in record.extents.values()):
        raise UserError(f"no share holds a document with text under --json-keys {' '.join(keys)}; name the keys that hold the text.")
    return keys


def find_prefixes(words: list[str], output_prefix: str) -> list[str]:
    """The prefixes that the words of --input name. A folder names all of its pairs, sorted by name. Raises UserError for half a pair."""
    found = [prefix for word in words for prefix in (_prefixes_in(Path(word)) if os.path.isdir(word) else [_without_ending(word)])]
    output = os.path.realpath(f"{output_prefix}.bin")
    named: dict[str, str] = {}
    for prefix in found:
        real = os.path.realpath(f"{prefix}.bin")
        if real == output:
            raise UserError(f"--output-prefix {output_prefix} is one of the corpora to merge; write to another place.")
        if real in named:
            spelled = "" if named[real] == prefix else f" (as {named[real]} before)"
            raise UserError(f"--input names {prefix} twice{spelled}; name it once.")
        named[real] = prefix
    if not found:
        raise UserError(f"--input {' '.join(words)} has no pair of .bin and .idx; give the folder of a corpus, or its prefix.")
    return found


def _prefixes_in(folder: Path) -> list[str]:
    names = {ending: {path.stem for path in folder.glob(f"*{ending}")} for ending in (".bin", ".idx")}
    for half in sorted(names[".bin"] ^ names[".idx"]):
        missing = ".idx" if half in names[".bin"] else ".bin"
        raise UserError(f"{folder / half}{missing} does not exist, but its other half does; copy it, or move the half away.")
    return [str(folder / name) for name in sorted(names[".bin"])]


def _without_ending(word: str) -> str:
    return word[:-4] if word.endswith((".bin", ".idx")) else word


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="merge_datasets.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="folders of corpora, or their prefixes, in this order")
    parser.add_argument("--output-prefix", required=True, help="the merged corpus is PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--shares", action="store_true", help="--input names prefixes of preprocess_data.py --share; each key becomes PREFIX_KEY_document"
    )
    parser.add_argument("--multimodal", action="store_true", help="refused: corpora hold text alone")
    return parser


if __name__ == "__main__":
    main()
