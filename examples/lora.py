"""Trains small adapters (LoRA, arXiv 2106.09685) on a frozen causal language model of Hugging Face's transformers, with ZeRO++.

    python -m examples.lora
    torchrun --nproc-per-node 2 -m examples.lora --model my_llama --text my_text.txt --save my_adapters.safetensors

Frozen weights have no gradients and no optimizer state, and rest in the type of the model that was read. Between nodes they cross once.
Without --model it is a small Llama with random weights, which reads bytes; without --text it learns a program. transformers must be
installed.
"""

from __future__ import annotations

import argparse

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from examples.hugging_face_model import add_training_flags, join_world, read_or_make_model, train
from megatron_zpp import ZEROPP, EngineOptions, full_weights, leave_world, shard

ADAPTED = ("q_proj", "v_proj")  # the layers of attention that get an adapter


class Adapted(nn.Module):
    """A frozen linear layer, and what is trained beside it: a product of two small matrices, which is zero at first."""

    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(hidden))
        return self.frozen(hidden) + self.scale * added


def main() -> None:
    args = parse_args()
    join_world()
    torch.manual_seed(0)  # every rank makes the same first weights
    model = read_or_make_model(args.model, dtype="auto")
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ADAPTED:
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name), args.rank, args.alpha))
    # The layers are units; the embedding, the last norm and the head belong to the whole model.
    layers = [f"model.layers.{index}" for index in range(len(model.model.layers))]
    engine = shard(model, layers, EngineOptions(policy=ZEROPP, dtype=torch.bfloat16))
    train(engine, args)

    weights = {name: weight.cpu() for name, weight in full_weights(engine, with_frozen=False)}
    if engine.rank == 0:
        numel = sum(weight.numel() for weight in weights.values())
        print(f"trained {numel} weights; each rank holds {engine.state_bytes().device} bytes of weights, gradients and optimizer state")
        if args.save is not None:
            save_file(weights, args.save)
            print(f"saved the adapters in {args.save}")
    engine.close()
    leave_world()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_training_flags(parser, learning_rate=1e-2)
    parser.add_argument("--save", metavar="FILE", help="where to save the adapters, a safetensors file")
    parser.add_argument("--rank", type=int, default=8, help="columns of an adapter's first matrix (default: 8)")
    parser.add_argument("--alpha", type=float, default=16.0, help="an adapter counts alpha/rank times (default: 16)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
