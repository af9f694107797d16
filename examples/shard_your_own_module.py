"""Trains a small network of your own with ZeRO-3: shard(), then backward() and step().

python examples/shard_your_own_module.py
torchrun --nproc-per-node 2 examples/shard_your_own_module.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # not needed once the package is installed

from megatron_zpp.comm.ledger import Category
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.shard import full_weights, leave_world, shard

STEPS, SAMPLES = 20, 64  # samples of a step, over all ranks


def main() -> None:
    if "RANK" in os.environ:  # torchrun started this process
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()

    torch.manual_seed(0)  # every rank makes the same first weights
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    # The units are the layers with parameters, in the order in which forward calls them.
    engine = shard(model, ["0", "2", "4"], EngineOptions(policy=POLICIES[3], dtype=torch.float32))

    for step in range(STEPS):
        inputs, labels = global_batch(step)
        mine = slice(engine.data_rank, None, engine.data_ranks)  # every rank takes its share of the samples
        loss = F.cross_entropy(model(inputs[mine].to(engine.device)), labels[mine].to(engine.device))
        engine.backward(loss)  # in place of loss.backward()
        engine.step(learning_rate=3e-3)  # in place of optimizer.step() and zero_grad()
        mean_loss = engine.gather_world(loss.detach().view(1)).mean().item()
        if engine.rank == 0 and (step % 5 == 4 or step == 0):
            print(f"step {step + 1:2d}: loss {mean_loss:.4f}")

    traffic = engine.links.ledger.total(Category.WEIGHTS, Category.GRADIENTS)
    weights = dict(full_weights(engine))  # the state dict of the module, which every rank helps to gather
    if engine.rank == 0:
        nbytes = engine.state_bytes().device
        print(f"in a world of {engine.world_size}, each rank holds {nbytes} bytes of weights, gradients and optimizer state")
        print(f"and received {(traffic.inter_bytes + traffic.intra_bytes) // STEPS} bytes per step for weights and gradients")
        print(f"the whole model has {sum(weight.numel() for weight in weights.values())} weights")
    engine.close()
    leave_world()


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Points around ten centers, and which center each belongs to."""
    centers = torch.randn(10, 32, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(100 + step)
    labels = torch.randint(10, (SAMPLES,), generator=generator)
    return centers[labels] + torch.randn(SAMPLES, 32, generator=generator), labels


if __name__ == "__main__":
    main()
