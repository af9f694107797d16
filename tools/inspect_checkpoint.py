"""Prints what a folder of checkpoints holds. With --verify, checks that every byte is as it was written."""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten

from cli.command import add_checkpoint_flags, run_command

from megatron_zpp.checkpoint.folders import LATEST_FILE, complete_iterations, leftovers, read_latest, saved_iterations
from megatron_zpp.checkpoint.manifest import Manifest
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.stored_flags import open_checkpoint
from megatron_zpp.config.counted import counted

DAMAGED_EXIT_CODE = 1


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Prints the report. Ends with exit code 1 if --verify finds damage."""
    for directory in filter(Path.is_dir, args.load):
        print("\n".join(directory_lines(directory)))
    with open_checkpoint(args.load[0], args.ckpt_step, *args.load[1:]) as reader:
        print("\n".join(checkpoint_lines(reader)))
        if args.parameters:
            print("\n".join(parameter_lines(reader.manifest)))
        if args.verify:
            _verify(reader)


SHOWN_EXTRA = 200  # characters of what a program has added


def directory_lines(directory: Path) -> Iterator[str]:
    """The iterations in the directory, and the leftovers of saves."""
    complete = complete_iterations(directory)
    yield f"{directory}: checkpoints of iterations {', '.join(map(str, complete)) or 'none'}"
    unusable = [str(iteration) for iteration in saved_iterations(directory) if iteration not in complete]
    if unusable:
        yield f"  incomplete or damaged: {', '.join(unusable)}"
    latest = read_latest(directory)
    if latest is not None:
        yield f"  {LATEST_FILE}: {latest[:40]}"
    for leftover in leftovers(directory):
        yield f"  not finished ({leftover.stage.value}): {leftover.folder.name}"


def checkpoint_lines(reader: CheckpointReader) -> Iterator[str]:
    """A description of one checkpoint."""
    manifest = reader.manifest
    numel = sum(math.prod(shape) for shape in manifest.shapes.values())
    nbytes = sum(file.nbytes for file in manifest.files)
    yield f"{reader.folder}: iteration {manifest.iteration}, {counted(manifest.consumed_samples, 'sample')} consumed"
    yield f"  {numel} parameters in {counted(len(manifest.shapes), 'tensor')}; states: {_pairs(manifest.states)}"
    yield (
        f"  {counted(len(manifest.files), 'file')}, {nbytes} bytes, {counted(len(manifest.pieces), 'piece')}, "
        f"chunks of {manifest.chunk_bytes} bytes"
    )
    run = dict(manifest.run)
    frozen, of_module = manifest.frozen, run.pop("module", {})
    if frozen:
        run["frozen"] = counted(len(frozen), "parameter")
    if isinstance(of_module, dict) and "extra" in of_module:
        run["extra"] = shorten(str(of_module["extra"]), SHOWN_EXTRA, placeholder=" ...")
    for title, members in (("topology", manifest.topology), ("versions", manifest.versions), ("run", run)):
        if members:
            yield f"  {title}: {_pairs(members)}"
    model = manifest.flags.get("model")
    if isinstance(model, dict):
        yield f"  model: {_pairs(model)}"


def parameter_lines(manifest: Manifest) -> Iterator[str]:
    """Every parameter with its shape and the number of its pieces, and of the ranges of columns into which they divide it."""
    columns: dict[str, list[tuple[int, int] | None]] = {name: [] for name in manifest.shapes}
    for piece in manifest.pieces:
        columns[piece.parameter].append(piece.columns)
    for name, shape in manifest.shapes.items():
        ranges = len(set(columns[name]))
        yield f"  {name} {list(shape)} in {counted(len(columns[name]), 'piece')}" + (
            f" of {ranges} ranges of columns" if ranges > 1 else ""
        )


def _pairs(members: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in members.items())


def _verify(reader: CheckpointReader) -> None:
    findings = list(reader.verify())
    if findings:
        print("\n".join(f"DAMAGED: {finding}" for finding in findings))
        sys.exit(DAMAGED_EXIT_CODE)
    nbytes = sum(file.nbytes for file in reader.manifest.files)
    print(f"verified: all {nbytes} bytes are as they were written")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inspect_checkpoint.py", description=__doc__, allow_abbrev=False)
    add_checkpoint_flags(parser)
    parser.add_argument("--parameters", action="store_true", help="list every parameter")
    parser.add_argument("--verify", action="store_true", help="read everything and compare checksums; exit code 1 on damage")
    return parser


if __name__ == "__main__":
    main()
