"""Makes a corpus from Python's standard library: its source files as JSON lines of {"text", "source"}."""

import argparse
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cli.command import megabytes, run_command

from megatron_zpp.config.counted import counted
from megatron_zpp.system.output_file import naming_file
from megatron_zpp.system.outside import OutsideFile
from megatron_zpp.system.user_error import UserError

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
SMALL_CORPUS_MEGABYTES = 5


class Source(NamedTuple):
    name: str  # path below the root, with forward slashes
    text: str


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes the corpus and prints its size. Raises UserError if no source file is found."""
    root = Path(sysconfig.get_path("stdlib"))
    document_count, text_bytes = write_corpus(root, Path(args.output), max_bytes=int(args.max_megabytes * 1e6))
    if document_count == 0:
        raise UserError(f"{root} holds no Python source to collect; give tools/preprocess_data.py JSON lines of your own.")
    print(f"{args.output}: {counted(document_count, 'document')}, {text_bytes / 1e6:.1f} MB of text from {root}")
    if text_bytes < SMALL_CORPUS_MEGABYTES * 1e6:
        print(f"This is less than {SMALL_CORPUS_MEGABYTES} MB: enough to try the tools, too little to train on.")


def write_corpus(root: Path, output: Path, *, max_bytes: int) -> tuple[int, int]:
    """Writes the corpus and returns its number of documents and bytes of text. It ends before the document that would exceed max_bytes.

    The output file appears only when it is complete.
    """
    if not output.name:
        raise UserError(f"--output {output} names no file; give one, such as corpus.jsonl.")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    document_count = text_bytes = 0
    try:
        with naming_file(output), open(temporary, "x", encoding="utf-8") as file:  # "x": a link of this name would be written through
            for source in sources(root):
                source_bytes = len(source.text.encode())
                if text_bytes + source_bytes > max_bytes:
                    break
                file.write(json.dumps({"text": source.text, "source": source.name}, ensure_ascii=False) + "\n")
                document_count, text_bytes = document_count + 1, text_bytes + source_bytes
        if document_count:
            os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return document_count, text_bytes


def sources(root: Path) -> Iterator[Source]:
    """The Python files below root that are UTF-8 and not empty, in an order that depends only on their names.

    Sorting by a hash of the name mixes the packages, so that every part of the corpus contains some of each.
    """
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [name.as_posix() for name in names if not SKIPPED_FOLDERS.intersection(name.parts)]
    for name in sorted(kept, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            text = OutsideFile(root / name, str(name)).content().decode("utf-8")
        except ValueError:
            # The tests of the standard library contain files in broken and other encodings on purpose.
            continue
        if text.strip():
            yield Source(name, text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="collect_corpus.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", required=True, help="file of JSON lines to write")
    parser.add_argument("--max-megabytes", type=megabytes, default=20, help="text to collect at most (default: 20)")
    return parser


if __name__ == "__main__":
    main()
