"""Sends weights and gradients between the nodes as 8-bit floats, by a codec that is written here.

The world is two nodes of two ranks, as threads of this process:

    python examples/codec_of_your_own.py
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # not needed once the package is installed

from megatron_zpp.comm.backend import Backend, VirtualWorld
from megatron_zpp.comm.code import EXACT, Code, LinkCodes, Runs
from megatron_zpp.comm.codecs import CastCodec, Codec, Regions, add_mean_
from megatron_zpp.comm.ledger import Category
from megatron_zpp.ops.payload import padded_bytes
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.engine import EngineOptions
from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.shard import shard

STEPS = 20
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Float8Codec:
    """float8_e4m3 values with one fp32 scale per block. A payload: | values | scales | exact run |, each padded to 16 bytes."""

    exact: CastCodec  # of one-dimensional parameters, which cross as they are
    block_numel: int
    rests_encoded: ClassVar[bool] = True

    def payload_bytes(self, runs: Runs) -> int:
        return self._exact_at(runs) + padded_bytes(runs.exact * self.exact.dtype.itemsize)

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        codes, scales, exact = self._parts(payloads, values.runs)
        blocks = values.blocks.float().unflatten(-1, (-1, self.block_numel))
        scales.copy_(blocks.abs().amax(-1) / LARGEST)
        codes.copy_((blocks / scales.clamp(min=1e-30).unsqueeze(-1)).flatten(-2))
        exact.copy_(values.exact)

    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        self.decode_mean_into(payloads.unsqueeze(0), values, accumulate=False)  # the mean of one

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        codes, scales, exact = self._parts(payloads, mean.runs)
        blocks = codes.float().unflatten(-1, (-1, self.block_numel)) * scales.unsqueeze(-1)
        add_mean_(mean.blocks, blocks.flatten(-2), accumulate=accumulate)
        add_mean_(mean.exact, exact, accumulate=accumulate)

    def keyed(self, key: int) -> Float8Codec:
        return self  # nothing is rounded by chance

    def _parts(self, payloads: Tensor, runs: Runs) -> tuple[Tensor, Tensor, Tensor]:
        """Views of payloads [..., payload_bytes]: float8 [..., run], fp32 [..., blocks of the run] and the exact run."""
        codes = payloads[..., : runs.blocks].view(torch.float8_e4m3fn)
        scales = CastCodec(torch.float32).run_at(payloads, padded_bytes(runs.blocks), runs.blocks // self.block_numel)
        return codes, scales, self.exact.run_at(payloads, self._exact_at(runs), runs.exact)

    def _exact_at(self, runs: Runs) -> int:
        return padded_bytes(runs.blocks) + padded_bytes(runs.blocks // self.block_numel * 4)


def make_codec(code: Code, dtype: torch.dtype, block_numel: int) -> Codec:
    """What the engine asks for each link: here 8 bits mean float8."""
    return CastCodec(dtype) if code.is_exact else Float8Codec(CastCodec(dtype), block_numel)


def train(model: nn.Module, options: EngineOptions, backend: Backend) -> tuple[list[float], int]:
    """One rank: the mean loss of every step, and the bytes that enter its node in a step."""
    model = copy.deepcopy(model)  # the ranks are threads, and each needs a module of its own
    engine = shard(model, ["0", "2"], options, backend=backend)
    losses = []
    for step in range(STEPS):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * engine.world_size + engine.rank))
        loss = (model(inputs) - inputs.roll(1, dims=1)).square().mean()
        engine.backward(loss)
        engine.step(learning_rate=3e-3)
        losses.append(engine.gather_world(loss.detach().view(1)).mean().item())
    ledger = engine.ladder.ledger
    entering = ledger.inter_node_bytes(ledger.total(Category.WEIGHTS, Category.GRADIENTS))
    engine.close()
    return losses, entering // STEPS


def main() -> None:
    torch.manual_seed(0)
    world = VirtualWorld(Topology.of_nodes(nodes=2, ranks_per_node=2))
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    plain = EngineOptions(POLICIES[3])
    between_nodes = LinkCodes(inter=Code(8), intra=EXACT)
    coded = replace(plain, policy=replace(plain.policy, weight_codes=between_nodes, gradient_codes=between_nodes), make_codec=make_codec)
    for name, options in (("plain", plain), ("float8", coded)):
        losses, entering = world.run(partial(train, model, options))[0]
        print(f"{name:6}: {entering:7d} bytes into a node per step, loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
