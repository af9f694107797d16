"""Continues a prompt with the model of a checkpoint, in one process. Any number of ranks may have saved the checkpoint."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

# First, so that Ctrl-C ends what follows in one line.
from cli.command import add_checkpoint_flags, count_from_0, count_from_1, run_command, text

# isort: split

import torch
from torch import nn

from megatron_zpp.checkpoint.manifest import Manifest
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.stored_flags import check_tokenizer_files, data_flags, model_flags, open_checkpoint, padded_vocab_size
from megatron_zpp.config.groups.data import TOKENIZER_FILES, TOKENIZER_TYPES
from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer, embedding_rows
from megatron_zpp.model.generation import Sampling, generated_tokens
from megatron_zpp.model.gpt import GPT
from megatron_zpp.system.user_error import UserError


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Prints the prompt and its continuation, up to the end of a document or --max-new-tokens."""
    reader = open_checkpoint(args.load[0], args.ckpt_step, *args.load[1:])
    data = data_config(reader.manifest, args)
    tokenizer = build_tokenizer(data)
    check_sizes(reader.manifest, tokenizer.vocab_size)
    sampling = Sampling(tokenizer.vocab_size, args.temperature, args.top_k)
    prompt = _prompt_ids(args.prompt, tokenizer, data)
    model = load_model(reader)
    generator = torch.Generator().manual_seed(args.seed)
    tokens = until_end(generated_tokens(model, prompt or [tokenizer.eod], sampling, generator), tokenizer)
    print(tokenizer.detokenize([*prompt, *islice(tokens, args.max_new_tokens)]))


def data_config(manifest: Manifest, args: argparse.Namespace) -> DataConfig:
    """The data flags of the run. A tokenizer that is given replaces that of the run. Raises CheckpointError if its files are not there."""
    data = data_flags(manifest)
    given = {name: getattr(args, name) for name in TOKENIZER_FILES if getattr(args, name) is not None}
    kind = args.tokenizer_type or data.tokenizer_type
    if kind == "NullTokenizer":
        ids = data.vocab_size if data.tokenizer_type == kind else padded_vocab_size(manifest)
        return replace(data, tokenizer_type=kind, tokenizer_model=None, vocab_file=None, merge_file=None, vocab_size=ids)
    if not given and kind == data.tokenizer_type:
        check_tokenizer_files(data, TOKENIZER_FILES)
        return data
    data = replace(data, tokenizer_type=kind, **given, vocab_size=None)  # the given files decide the number of ids
    check_tokenizer_files(data, [name for name in TOKENIZER_FILES if name not in given])
    return data


def check_sizes(manifest: Manifest, ids: int) -> None:
    """Raises UserError unless a model of so many ids has the rows of this one."""
    rows = padded_vocab_size(manifest)
    own_rows = ids if ids > rows else embedding_rows(model_flags(manifest), ids)
    if own_rows == rows:
        return
    padded = f", with padding {own_rows}" if own_rows > ids else ""
    raise UserError(f"the tokenizer has {ids} ids{padded}, and the model {rows}; give the --tokenizer-model that the training used.")


def _prompt_ids(prompt: str, tokenizer: Tokenizer, data: DataConfig) -> list[int]:
    """The ids of the prompt, without the end of the document if the tokenizer puts one behind every text."""
    try:
        ids, ids_of_no_text = tokenizer.tokenize(prompt), tokenizer.tokenize("")
    except UserError as error:
        if data.tokenizer_type != "NullTokenizer":
            raise
        raise UserError(f"{error} The checkpoint names no tokenizer of text; --tokenizer-type and --tokenizer-model give one.") from None
    end = [tokenizer.eod]
    return ids[:-1] if ids_of_no_text[-1:] == end == ids[-1:] else ids


def load_model(reader: CheckpointReader) -> GPT:
    """The checkpoint's model in evaluation mode, with its main weights in fp32 on the CPU."""
    config = model_flags(reader.manifest)
    model = GPT(config, padded_vocab_size(reader.manifest), seed=0, dtype=torch.float32)
    for unit in model.unit_specs():
        for param in unit.params:
            owner, _, attribute = param.name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(reader.weight(param.name), requires_grad=False))
    return model.eval()


def until_end(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[int]:
    """The tokens before the first end of a document."""
    for token in tokens:
        if token == tokenizer.eod:
            return
        yield token


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="generate_text.py", description=__doc__, allow_abbrev=False)
    add_checkpoint_flags(parser)
    parser.add_argument("--prompt", type=text, default="", metavar="TEXT", help="text to continue (default: the start of a document)")
    parser.add_argument("--max-new-tokens", type=count_from_1, default=128, metavar="N", help="tokens to generate at most (default: 128)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0 always takes the likeliest token (default: 1)")
    parser.add_argument("--top-k", type=count_from_0, default=0, metavar="N", help="draw among the N likeliest tokens; 0: all (default: 0)")
    parser.add_argument("--seed", type=count_from_0, default=1234, metavar="N", help="seed of the drawing (default: 1234)")
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="kind of tokenizer (default: the one the training used)")
    for name in TOKENIZER_FILES:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="PATH", help="tokenizer file (default: the one the training used)")
    return parser


if __name__ == "__main__":
    main()
