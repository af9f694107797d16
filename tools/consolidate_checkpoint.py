"""Writes the weights of a checkpoint, saved by any number of ranks, as plain safetensors with our names and shapes."""

import argparse
from pathlib import Path

from cli.command import ELEMENT_TYPES, add_checkpoint_flags, add_output_flags, run_command

from megatron_zpp.checkpoint.export import PART_NUMEL, new_folder, write_json, write_parts
from megatron_zpp.checkpoint.shard_file import TensorEntry
from megatron_zpp.checkpoint.stored_flags import open_checkpoint
from megatron_zpp.config.counted import counted


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes the weights part by part, and the flags of the run into flags.json."""
    with open_checkpoint(args.load[0], args.ckpt_step, *args.load[1:]) as reader:
        entries = [TensorEntry(name, ELEMENT_TYPES[args.dtype], shape) for name, shape in reader.manifest.shapes.items()]
        with new_folder(Path(args.output)) as folder:
            files = write_parts(folder, entries, lambda entry: reader.weight_in_parts(entry.name, PART_NUMEL), args.max_shard_bytes)
            write_json(folder / "flags.json", dict(reader.manifest.flags))
        parameters, iteration = counted(len(entries), "parameter"), reader.manifest.iteration
        print(f"{args.output}: {parameters} of iteration {iteration} in {counted(len(files), 'file')}, {args.dtype}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="consolidate_checkpoint.py", description=__doc__, allow_abbrev=False)
    add_checkpoint_flags(parser)
    add_output_flags(parser)
    return parser


if __name__ == "__main__":
    main()
