"""A checkpoint as a model folder of Hugging Face in GPT-2's layout: one process, memory for one tensor, neither GPU nor process group."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command import ELEMENT_TYPES, add_checkpoint_flags, add_output_flags, run_command

from megatron_zpp.checkpoint.export import new_folder, write_json, write_tensors
from megatron_zpp.checkpoint.gpt2_layout import config_json, rules
from megatron_zpp.checkpoint.hf_tokenizer import write_tokenizer
from megatron_zpp.checkpoint.manifest import Manifest
from megatron_zpp.checkpoint.shard_file import TensorEntry
from megatron_zpp.checkpoint.stored_flags import data_flags, model_flags, open_checkpoint, padded_vocab_size
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.tokenizer import build_tokenizer


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes config.json, weights and tokenizer files."""
    with open_checkpoint(Path(args.load), args.ckpt_step) as reader:
        model, padded = model_flags(reader.manifest), padded_vocab_size(reader.manifest)
        data = _data(reader.manifest, args)
        tokenizer = build_tokenizer(data) if data.tokenizer_type is not None else None
        vocab_size = padded if args.keep_vocab_padding else _vocab_size(data, padded)
        rule_of = {rule.name: rule for rule in rules(model, vocab_size, padded)}
        entries = [TensorEntry(rule.name, ELEMENT_TYPES[args.dtype], rule.shape) for rule in rule_of.values()]

        def values_of(entry: TensorEntry) -> Tensor:
            rule = rule_of[entry.name]
            return rule.to_theirs(reader.weight(rule.ours))

        with new_folder(Path(args.output)) as folder:
            write_json(folder / "config.json", config_json(model, vocab_size, None if tokenizer is None else tokenizer.eod))
            files = write_tensors(folder, entries, values_of, args.max_shard_bytes)
            told = write_tokenizer(folder, data.tokenizer_type, data.tokenizer_model)
    print(f"{args.output}: {len(entries)} tensors in {len(files)} files, vocabulary of {vocab_size} ids; {told}")


def _data(manifest: Manifest, args: argparse.Namespace) -> DataConfig:
    data = data_flags(manifest)
    data = data if args.tokenizer_model is None else replace(data, tokenizer_model=args.tokenizer_model)
    return data if args.vocab_size is None else replace(data, vocab_size=args.vocab_size)


def _vocab_size(data: DataConfig, padded: int) -> int:
    if data.vocab_size is None:
        raise ValueError("the checkpoint does not say how many ids its tokenizer has; give --vocab-size or --keep-vocab-padding.")
    if data.vocab_size > padded:
        raise ValueError(f"--vocab-size {data.vocab_size} is more than the {padded} rows of the embedding; correct it.")
    return data.vocab_size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="convert_to_hf.py", description=__doc__, allow_abbrev=False)
    add_checkpoint_flags(parser)
    add_output_flags(parser)
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids of the tokenizer (default: what the checkpoint says)")
    parser.add_argument("--keep-vocab-padding", action="store_true", help="keep the rows that pad the vocabulary")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="SentencePiece model (default: the one the training used)")
    return parser


if __name__ == "__main__":
    main()
