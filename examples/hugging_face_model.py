"""Trains a causal language model of Hugging Face's transformers with ZeRO++, in bf16 with fp32 main weights, and saves it for transformers.

    python -m examples.hugging_face_model
    torchrun --nproc-per-node 2 -m examples.hugging_face_model --model my_llama --text my_text.txt --save my_trained_llama

Without --model it is a small Llama with random weights, which reads bytes; without --text it learns this file. transformers must be
installed. The paths of the units are those of Llama and of models built like it (Mistral, Mixtral, Qwen, Gemma, OLMo, Phi, DeepSeek).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from megatron_zpp import ZEROPP, EngineOptions, ZeroEngine, full_weights, leave_world, shard


def main() -> None:
    args = parse_args()
    join_world()
    torch.manual_seed(0)  # every rank makes the same first weights
    model = read_or_make_model(args.model)
    layers = [f"model.layers.{index}" for index in range(len(model.model.layers))]
    units = ["model.embed_tokens", *layers, "lm_head"]  # the last norm is in none of them, and so in the unit of the whole model
    engine = shard(model, units, EngineOptions(policy=ZEROPP, dtype=torch.bfloat16))
    train(engine, args)

    if args.save is not None:
        # Every rank helps to gather the weights, and only the rank that saves keeps them.
        weights = {name: weight.cpu() for name, weight in full_weights(engine) if engine.rank == 0}
        if engine.rank == 0:
            model.save_pretrained(args.save, state_dict=weights)
            print(f"saved in {args.save}, for AutoModelForCausalLM.from_pretrained()")
    engine.close()
    leave_world()


def join_world() -> None:
    if "RANK" in os.environ:  # torchrun started this process
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()


def train(engine: ZeroEngine, args: argparse.Namespace) -> None:
    for buffer in engine.module.buffers():
        buffer.data = buffer.to(engine.device)  # shard() moves parameters only
    engine.module.train()
    tokens = read_tokens(args.text, args.model)
    if len(tokens) <= args.length:
        raise SystemExit(f"--text {args.text} has {len(tokens)} tokens; give more text, or a --length below that.")
    for step in range(args.steps):
        sample = torch.randint(len(tokens) - args.length, (args.batch,), generator=generator_of(step, engine.data_rank))
        ids = torch.stack([tokens[start : start + args.length] for start in sample.tolist()]).to(engine.device)
        loss = engine.module(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)  # in place of loss.backward()
        result = engine.step(learning_rate=args.lr)  # in place of optimizer.step() and zero_grad()
        mean_loss = engine.gather_world(loss.detach().float().view(1)).mean().item()
        if engine.rank == 0 and (step % 10 == 9 or step == 0):
            print(f"step {step + 1:3d}: loss {mean_loss:.4f}, gradient norm {result.grad_norm:.3f}")


def read_or_make_model(folder: str | None, dtype: torch.dtype | str = torch.float32) -> Any:
    """dtype: of the weights that are read; "auto" is the one in which they were saved."""
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    small = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
    return AutoModelForCausalLM.from_config(small)


def read_tokens(text: str, folder: str | None) -> Tensor:
    """[tokens] int64, the ids of the whole file; without a folder that has a tokenizer, its bytes."""
    if folder is None:
        return torch.tensor(list(Path(text).read_bytes()))
    return torch.tensor(AutoTokenizer.from_pretrained(folder)(Path(text).read_text(encoding="utf-8")).input_ids)


def generator_of(step: int, rank: int) -> torch.Generator:
    """Each rank draws samples of its own."""
    return torch.Generator().manual_seed(1_000_000 * step + rank)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_flags(parser, learning_rate=1e-3)
    parser.add_argument("--save", metavar="FOLDER", help="where to save the trained model")
    return parser.parse_args()


def add_training_flags(parser: argparse.ArgumentParser, learning_rate: float) -> None:
    parser.add_argument("--model", metavar="FOLDER", help="a model and its tokenizer, as save_pretrained() writes them")
    parser.add_argument("--text", metavar="FILE", default=__file__, help="what to learn (default: a program in Python)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step (default: 4)")
    parser.add_argument("--length", type=int, default=64, help="tokens per sample (default: 64)")
    parser.add_argument("--lr", type=float, default=learning_rate)


if __name__ == "__main__":
    main()
