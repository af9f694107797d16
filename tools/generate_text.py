"""Text that a checkpoint's model writes after a prompt: one process reads the weights, whatever number of ranks saved them."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command import run_command

from megatron_zpp.checkpoint.manifest import CheckpointError, Manifest, find_checkpoint
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.config.schema import DataConfig, ModelConfig
from megatron_zpp.data.tokenizer import Tokenizer, build_tokenizer
from megatron_zpp.model.generation import Sampling, generated_tokens
from megatron_zpp.model.gpt import GPT

Group = TypeVar("Group", DataConfig, ModelConfig)


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Prints prompt and continuation, up to the end of a document or --max-new-tokens."""
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens} asks for no token; give 1 or more.")
    reader = open_checkpoint(Path(args.load), args.ckpt_step)
    tokenizer = build_tokenizer(data_config(reader.manifest, args.tokenizer_model))
    sampling = Sampling(tokenizer.vocab_size, args.temperature, args.top_k)
    prompt = tokenizer.tokenize(args.prompt)
    model = load_model(reader)
    if tokenizer.vocab_size > model.padded_vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, more than the {model.padded_vocab_size} of the model; "
            "give the --tokenizer-model that the training used."
        )
    generator = torch.Generator().manual_seed(args.seed)
    tokens = until_end(generated_tokens(model, prompt or [tokenizer.eod], sampling, generator), tokenizer)
    print(tokenizer.detokenize([*prompt, *islice(tokens, args.max_new_tokens)]))


def open_checkpoint(directory: Path, step: int | None) -> CheckpointReader:
    """The checkpoint of iteration `step`, else the latest. Raises CheckpointError where there is none."""
    folder = find_checkpoint(directory, step)
    if folder is None:
        raise CheckpointError(f"--load {directory} holds no checkpoint; give the folder that --save of the training named.")
    return CheckpointReader(folder)


def data_config(manifest: Manifest, tokenizer_model: str | None) -> DataConfig:
    """The run's flags about text, with tokenizer_model instead of its own where one is given."""
    data = _group(DataConfig, manifest, "data")
    return data if tokenizer_model is None else replace(data, tokenizer_model=tokenizer_model)


def load_model(reader: CheckpointReader) -> GPT:
    """The checkpoint's model in evaluation mode, its main weights in fp32 on the CPU."""
    config = replace(_group(ModelConfig, reader.manifest, "model"), norm_backend="torch")  # Apex normalizes on GPUs only
    model = GPT(config, _flags(reader.manifest, "padded_vocab_size"), seed=0, dtype=torch.float32)
    for unit in model.unit_specs():
        for param in unit.params:
            owner, _, attribute = param.name.rpartition(".")
            parameter = getattr(model.get_submodule(owner), attribute)
            weight = reader.read(param.name, "weight", 0, parameter.numel()).view(param.shape)
            setattr(model.get_submodule(owner), attribute, nn.Parameter(weight, requires_grad=False))
    return model.eval()


def until_end(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[int]:
    """The tokens before the first end of a document."""
    for token in tokens:
        if token == tokenizer.eod:
            return
        yield token


def _flags(manifest: Manifest, name: str) -> Any:
    if name not in manifest.flags:
        raise CheckpointError(f"the manifest of iteration {manifest.iteration} lacks {name} among its flags; choose another checkpoint.")
    return manifest.flags[name]


def _group(kind: type[Group], manifest: Manifest, name: str) -> Group:
    try:
        return kind(**_flags(manifest, name))
    except TypeError as error:
        raise CheckpointError(
            f"the {name} flags in the manifest of iteration {manifest.iteration} are not this program's ({error})."
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="generate_text.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--load", required=True, metavar="DIR", help="folder that --save of the training named")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint (default: the latest)")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue (default: the start of a document)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens to generate at most (default: 128)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0 always takes the likeliest token (default: 1)")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="draw among the N likeliest tokens only; 0: all (default: 0)")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the drawing (default: 1234)")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="SentencePiece model (default: the one the training used)")
    return parser


if __name__ == "__main__":
    main()
