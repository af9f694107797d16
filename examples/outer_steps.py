"""Trains a small GPT on bytes of text, on islands that agree every few steps only (DiLoCo): for nodes that a slow link joins.

Every node trains a copy of the model by itself, with ZeRO-3 inside. Every --sync-period steps a unit of the model moves to where all nodes
together have come; what a node has learned crosses the slow link in 3 bits per value, and so does the change of the shared weights.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE:29500 -m examples.outer_steps
    torchrun --nproc-per-node 2 -m examples.outer_steps --islands 2
    python -m examples.outer_steps
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp import POLICIES, Category, EngineOptions, OuterOptions, OuterSteps, join_islands, leave_world, load, save, shard

WIDTH, HEADS, LAYERS, CONTEXT = 96, 4, 3, 64
BATCH = 32  # samples of a step over all islands, and of an evaluation
RATE, WARM_UP = 3e-3, 16


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.values(tokens) + self.places.weight
        return embedded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, hidden.device, hidden.dtype)
        output: Tensor = self.layer(hidden, src_mask=mask, is_causal=True)
        return output


def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:  # torchrun started this process
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    nodes = int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    torch.manual_seed(0)  # every rank makes the same first weights
    model = nn.Sequential(Tokens(), *(Block() for _ in range(LAYERS)), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)))
    units = [name for name, _ in model.named_children()]
    engine = shard(model, units, EngineOptions(POLICIES[3], dtype=torch.bfloat16), islands=nodes if args.islands is None else args.islands)
    # Until the end of the warm-up islands take the mean of their weights after every step.
    outer = join_islands(engine, OuterOptions(period=args.sync_period, start_iteration=WARM_UP))

    restored = load(engine, args.checkpoints, missing_ok=True, outer=outer) if args.checkpoints else None
    training, held_out = read_text()
    for step in range(restored.step if restored else 0, args.steps):
        # Every rank of every island takes its share of the samples.
        tokens = samples(training, step)[outer.data_rank :: outer.data_ranks].to(engine.device)
        loss = loss_of(model, tokens)
        engine.backward(loss)
        engine.step(learning_rate(step, args.steps))
        outer.step()
        if step + 1 in (1, args.steps) or (step + 1) % args.sync_period == 0:
            report(step + 1, model, outer, held_out)
        if args.checkpoints and (step + 1) % args.sync_period == 0:
            save(engine, args.checkpoints, step + 1, keep_last=2, outer=outer)

    outer.take_means()  # of what islands have learned since they last agreed
    report(args.steps, model, outer, held_out)
    outer.close()
    engine.close()
    leave_world()


def report(steps: int, model: nn.Module, outer: OuterSteps, held_out: Tensor) -> None:
    """Prints the loss of the weights that islands share, and what has come from other islands."""
    engine = outer.engine
    with outer.outer_weights(), torch.no_grad():
        loss = loss_of(model, samples(held_out, 0)[engine.data_rank :: engine.data_ranks].to(engine.device))
    mean = engine.gather_world(loss.view(1)).mean().item()
    ledger = engine.links.ledger
    from_islands = ledger.inter_node_bytes(ledger.total(Category.OUTER))
    if outer.data_rank == 0:
        print(f"after {steps:3d} steps: loss {mean:.4f} on text held out; {from_islands} bytes have come into a node from other islands")


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def learning_rate(step: int, steps: int) -> float:
    """Warm-up, then a cosine down to a tenth."""
    return RATE * min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def read_text() -> tuple[Tensor, Tensor]:
    """Bytes of the pages of docs/, and the last tenth of them, to hold out."""
    pages = sorted(Path("docs").glob("*.md"))
    text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8)
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def samples(text: Tensor, seed: int) -> Tensor:
    """[BATCH, CONTEXT + 1] bytes from random places."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(CONTEXT + 1)].long()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--islands", type=int, help="into how many equal parts the ranks are cut; by default every node is one")
    parser.add_argument("--sync-period", type=int, default=16, help="steps from one exchange of a unit to its next")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--checkpoints", metavar="FOLDER", help="where to save every --sync-period steps, and from where to go on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
