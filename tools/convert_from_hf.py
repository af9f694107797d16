"""Converts a model of Hugging Face (safetensors) to a checkpoint for --load, with weights only and iteration 0.

It reads GPT-2, Llama, Mistral without a sliding window, Qwen2 and Qwen3.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from cli.command import run_command, vocabulary_size
from cli.tokenizer_flags import add_recorded_tokenizer
from torch import Tensor

from megatron_zpp.checkpoint.hf.folder import HfFolder
from megatron_zpp.checkpoint.hf.settings import setting
from megatron_zpp.checkpoint.release import write_release
from megatron_zpp.checkpoint.stored_flags import units_of
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.tokenizers.tokenizer import build_tokenizer, padded_vocab_size
from megatron_zpp.system.user_error import UserError


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes the checkpoint and prints how to train with it."""
    source = HfFolder(Path(args.input))
    model, vocab_size = source.layout.model_config(source.config), setting(source.config, "vocab_size", "padded_vocab_size")
    padded = padded_vocab_size(vocab_size, args.make_vocab_size_divisible_by)
    # The number of rows is recorded, because a tokenizer with fewer ids would lead to fewer rows.
    model = replace(model, make_vocab_size_divisible_by=args.make_vocab_size_divisible_by, padded_vocab_size=padded)
    rule_of = {rule.parameter: rule for rule in source.layout.rules(model, vocab_size, padded)}
    source.check_tensors([tensor for rule in rule_of.values() for tensor in rule.hf_tensors], model)

    def weight_of(name: str) -> Tensor:
        rule = rule_of[name]
        return rule.join([source.read(tensor.name, tensor.shape) for tensor in rule.hf_tensors])

    data, about_tokenizer = _tokenizer(args, vocab_size, padded)
    flags = {"model": asdict(model), "data": asdict(data), "padded_vocab_size": padded}
    folder = write_release(Path(args.output), units_of(model, padded), weight_of, flags)
    print(f"{folder}: {len(rule_of)} parameters, vocabulary of {vocab_size} ids padded to {padded}; {about_tokenizer}")
    print(f"train with --load {args.output} --use-checkpoint-args, or with --pretrained-checkpoint {args.output} and --load of the run")


def _tokenizer(args: argparse.Namespace, vocab_size: int, padded: int) -> tuple[DataConfig, str]:
    """The tokenizer to record, and a sentence about it. Unless flags say it, that of tokenizer.json if it can be used."""
    ids = DataConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size)
    if args.tokenizer_type == "NullTokenizer":
        return replace(ids, tokenizer_model=args.tokenizer_model), "no tokenizer of text is recorded"
    if args.tokenizer_type is not None:
        data = DataConfig(tokenizer_type=args.tokenizer_type, tokenizer_model=args.tokenizer_model)
        return data, f"the recorded tokenizer is {args.tokenizer_type}"
    if args.tokenizer_model is not None:
        raise UserError(f"--tokenizer-model {args.tokenizer_model} needs --tokenizer-type, which says how to read it.")
    folder = Path(args.input).resolve()  # for runs that start elsewhere
    if not (folder / "tokenizer.json").is_file():
        return ids, "no tokenizer of text is recorded, because the folder has no tokenizer.json"
    # An embedding of Hugging Face may have more rows than the tokenizer has ids.
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    try:
        rows = build_tokenizer(data).vocab_size
    except UserError as error:
        return ids, f"no tokenizer of text is recorded: {error}"
    if rows > padded:
        return ids, f"no tokenizer of text is recorded, because with tokenizer.json there are {rows} ids, and {vocab_size} rows"
    return data, f"the recorded tokenizer is HuggingFaceTokenizer with {folder}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="convert_from_hf.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", required=True, metavar="DIR", help="folder with config.json and safetensors")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for --load or --pretrained-checkpoint")
    parser.add_argument(
        "--make-vocab-size-divisible-by", type=vocabulary_size, default=128, metavar="N", help="as in the training to come (default: 128)"
    )
    add_recorded_tokenizer(parser, None, "HuggingFaceTokenizer with the folder's tokenizer.json, else NullTokenizer")
    return parser


if __name__ == "__main__":
    main()
