"""Converts a checkpoint to a model folder of Hugging Face, in one process with memory for one tensor, without GPU and process group.

The layout is that of GPT-2, Llama, Qwen2 or Qwen3, whichever can express the model.
"""

import argparse
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from cli.command import ELEMENT_TYPES, add_checkpoint_flags, add_output_flags, run_command, vocabulary_size
from torch import Tensor

from megatron_zpp.checkpoint.export import new_folder, write_json, write_tensors
from megatron_zpp.checkpoint.hf.layouts import layout_holding
from megatron_zpp.checkpoint.hf.tokenizer import boundaries_of, write_tokenizer
from megatron_zpp.checkpoint.manifest import Manifest
from megatron_zpp.checkpoint.shard_file import TensorEntry
from megatron_zpp.checkpoint.stored_flags import check_tokenizer_files, data_flags, model_flags, open_checkpoint, padded_vocab_size
from megatron_zpp.config.counted import counted
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.tokenizers.tokenizer import build_tokenizer
from megatron_zpp.system.user_error import UserError


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes config.json, the weights and the tokenizer files, and prints what was written."""
    with open_checkpoint(args.load[0], args.ckpt_step, *args.load[1:]) as reader:
        model, padded = model_flags(reader.manifest), padded_vocab_size(reader.manifest)
        data = _data(reader.manifest, args)
        tokenizer = build_tokenizer(data) if data.tokenizer_type is not None else None
        ids = data.vocab_size if tokenizer is None else tokenizer.vocab_size
        vocab_size = _vocab_size(ids, padded, keeps_padding=args.keep_vocab_padding)
        layout = layout_holding(model)
        rules = list(layout.rules(model, vocab_size, padded))
        place_of = {tensor.name: (rule, index) for rule in rules for index, tensor in enumerate(rule.hf_tensors)}
        entries = [TensorEntry(tensor.name, ELEMENT_TYPES[args.dtype], tensor.shape) for rule in rules for tensor in rule.hf_tensors]
        weight = lru_cache(maxsize=1)(reader.weight)  # the tensors of one parameter follow each other

        def values_of(entry: TensorEntry) -> Tensor:
            rule, index = place_of[entry.name]
            return rule.split(weight(rule.parameter))[index]

        with new_folder(Path(args.output)) as folder:
            written_tokenizer = write_tokenizer(folder, data, tokenizer, layout.model_type)
            members = {"torch_dtype": args.dtype, **written_tokenizer.members}  # all versions of transformers read torch_dtype
            write_json(folder / "config.json", layout.config_json(model, vocab_size, boundaries_of(tokenizer)) | members)
            files = write_tensors(folder, entries, values_of, args.max_shard_bytes)
    written = f"{counted(len(entries), 'tensor')} in {counted(len(files), 'file')}"
    print(f"{args.output}: layout of {layout.model_type}, {written}, {vocab_size} ids; {written_tokenizer.note}")


def _data(manifest: Manifest, args: argparse.Namespace) -> DataConfig:
    data = data_flags(manifest)
    if args.tokenizer_model is None:
        check_tokenizer_files(data, ["tokenizer_model"])
    else:
        data = replace(data, tokenizer_model=args.tokenizer_model)
    return data if args.vocab_size is None else replace(data, vocab_size=args.vocab_size)


def _vocab_size(ids: int | None, padded: int, *, keeps_padding: bool) -> int:
    if ids is not None and ids > padded:
        raise UserError(
            f"the tokenizer has {ids} ids, more than the {padded} rows of the embedding; give the --vocab-size of the training, or its "
            "--tokenizer-model without files beside tokenizer.json that name more tokens."
        )
    if keeps_padding:
        return padded
    if ids is None:
        raise UserError("the checkpoint does not say how many ids its tokenizer has; give --vocab-size or --keep-vocab-padding.")
    return ids


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="convert_to_hf.py", description=__doc__, allow_abbrev=False)
    add_checkpoint_flags(parser)
    add_output_flags(parser)
    parser.add_argument("--vocab-size", type=vocabulary_size, metavar="N", help="ids of the tokenizer (default: what the checkpoint says)")
    parser.add_argument("--keep-vocab-padding", action="store_true", help="keep the rows that pad the vocabulary")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="the tokenizer's model (default: the one the training used)")
    return parser


if __name__ == "__main__":
    main()
