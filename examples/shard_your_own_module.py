"""Trains a small vision transformer of your own with ZeRO-3: shard(), then backward() and step(); save() and load() to go on later.

python -m examples.shard_your_own_module
torchrun --nproc-per-node 2 -m examples.shard_your_own_module --checkpoints my_checkpoints
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp import POLICIES, Category, EngineOptions, full_weights, leave_world, load, save, shard

SAMPLES = 64  # of a step, over all ranks
WIDTH, PATCHES, CLASSES = 32, 4, 10


class ViT(nn.Module):
    """The class token, the positions and the head belong to the whole module."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 1 + PATCHES, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.cls.expand(len(hidden), -1, -1), hidden], dim=1) + self.pos
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden[:, 0])


def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:  # torchrun started this process
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()

    torch.manual_seed(0)  # every rank makes the same first weights
    model = ViT()
    # The units, in the order in which forward calls them. The parameters that are in none of them are one more unit.
    engine = shard(model, ["patches", "layers.0", "layers.1"], EngineOptions(policy=POLICIES[3]))

    restored = load(engine, args.checkpoints, missing_ok=True) if args.checkpoints else None
    for step in range(restored.step if restored else 0, args.steps):
        images, labels = global_batch(step)
        mine = slice(engine.data_rank, None, engine.data_ranks)  # every rank takes its share of the samples
        loss = F.cross_entropy(model(images[mine].to(engine.device)), labels[mine].to(engine.device))
        engine.backward(loss)  # in place of loss.backward()
        engine.step(learning_rate=3e-3)  # in place of optimizer.step() and zero_grad()
        mean_loss = engine.gather_world(loss.detach().view(1)).mean().item()
        if engine.rank == 0 and (step % 5 == 4 or step == 0):
            print(f"step {step + 1:2d}: loss {mean_loss:.4f}")
        if args.checkpoints and step % 10 == 9:
            save(engine, args.checkpoints, step + 1, keep_last=2)

    traffic = engine.links.ledger.total(Category.WEIGHTS, Category.GRADIENTS)
    weights = dict(full_weights(engine))  # the state dict of the module, which every rank helps to gather
    if engine.rank == 0:
        nbytes = engine.state_bytes().device
        print(f"in a world of {engine.world_size}, each rank holds {nbytes} bytes of weights, gradients and optimizer state")
        print(f"and received {(traffic.inter_bytes + traffic.intra_bytes) // args.steps} bytes per step for weights and gradients")
        print(f"the whole model has {sum(weight.numel() for weight in weights.values())} weights")
    engine.close()
    leave_world()


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Noisy copies of ten images, and which image each of them is."""
    originals = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(100 + step)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return originals[labels] + 0.5 * torch.randn(SAMPLES, 1, 8, 8, generator=generator), labels


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", metavar="FOLDER", help="where to save every ten steps, and from where to go on")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
