"""Converts a checkpoint of Megatron-LM or Megatron-DeepSpeed to one for --load, with weights only. Its files are never unpickled.

--dry-run reads everything but the weights, and lists which tensor becomes which parameter.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from cli.command import count_from_0, run_command, vocabulary_size
from cli.tokenizer_flags import add_recorded_tokenizer

from megatron_zpp.checkpoint.megatron.arguments import flags_in_words, model_of
from megatron_zpp.checkpoint.megatron.folder import find_iteration, read_source
from megatron_zpp.checkpoint.megatron.joining import Joining
from megatron_zpp.checkpoint.release import write_release
from megatron_zpp.config.counted import counted
from megatron_zpp.config.schema import DataConfig

MOST_SHOWN = 5


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes the checkpoint, and prints what it holds and how to train with it."""
    folder = find_iteration(Path(args.input), args.ckpt_step)
    source = read_source(folder)
    model = model_of(source.arguments, str(folder))
    joining = Joining(source, model, args.vocab_size, args.make_vocab_size_divisible_by)
    padded = joining.padded_vocab_size
    place = f"iteration {source.iteration}, {counted(source.consumed_samples, 'sample')}"
    print(f"{folder}: {source.kind}, {place}, {counted(len(source.ranks), 'tensor rank')}")
    print(f"model: {flags_in_words(model)}")
    print(f"vocabulary: {joining.rows} of {joining.stored_rows} rows, padded to {padded}")
    for remark in source.remarks:
        print(remark)
    if args.dry_run:
        print(*_mapping(joining), sep="\n")
        return
    # The number of rows is recorded, because another padding would lead to another.
    model = replace(model, make_vocab_size_divisible_by=args.make_vocab_size_divisible_by, padded_vocab_size=padded)
    data = DataConfig(tokenizer_type=args.tokenizer_type, tokenizer_model=args.tokenizer_model, vocab_size=_ids(args, joining))
    flags = {"model": asdict(model), "data": asdict(data), "padded_vocab_size": padded}
    written = write_release(Path(args.output), joining.units, joining.weight, flags)
    if joining.differing:
        shown = ", ".join(joining.differing[:MOST_SHOWN])
        differing = counted(len(joining.differing), "parameter differs", "parameters differ")
        print(f"WARNING: {differing} between tensor ranks; taken from rank 0: {shown}")
    print(f"{written}: {sum(len(unit.params) for unit in joining.units)} parameters")
    print(f"train with --load {args.output} --use-checkpoint-args, or with --pretrained-checkpoint {args.output} and --load of the run")


def _ids(args: argparse.Namespace, joining: Joining) -> int | None:
    return joining.rows if args.tokenizer_type == "NullTokenizer" else None


def _mapping(joining: Joining) -> Iterator[str]:
    """A line for each parameter: its name and shape here, how parts are joined, and the first part."""
    for unit in joining.units:
        for param in unit.params:
            shape = "x".join(map(str, param.whole_shape))
            parts = joining.parts(param.name)
            joint = "" if len(parts) == 1 else f" (of {len(parts)} ranks: {joining.joint(param.name).value})"
            yield f"{param.name} [{shape}] from {parts[0].where}{joint}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="convert_from_megatron.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", required=True, metavar="DIR", help="folder that --save of Megatron named, or that of an iteration in it")
    parser.add_argument("--ckpt-step", type=count_from_0, metavar="N", help="iteration of the checkpoint (default: the latest)")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for --load or --pretrained-checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="write nothing, and list which tensor becomes which parameter")
    parser.add_argument(
        "--vocab-size", type=vocabulary_size, metavar="N", help="ids of the tokenizer; cuts the padding off (default: all rows are kept)"
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by", type=vocabulary_size, default=128, metavar="N", help="with --vocab-size, the new padding"
    )
    add_recorded_tokenizer(parser)
    return parser


if __name__ == "__main__":
    main()
