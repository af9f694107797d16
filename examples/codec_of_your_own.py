"""Sends weights and gradients between nodes as 8-bit floats, by a codec that is written here.

The world is two nodes of two ranks, which run as threads of this process:

    python -m examples.codec_of_your_own
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron_zpp.comm.backend import Backend, VirtualWorld
from megatron_zpp.comm.code import EXACT, Code, LinkCodes, SliceShape
from megatron_zpp.comm.codecs import CastCodec, Codec, Regions
from megatron_zpp.comm.ledger import Category
from megatron_zpp.ops.means import mean_values
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.shard import shard

STEPS, SCALE_BYTES = 20, 16  # rows of payloads begin at multiples of 16 bytes, so the scale takes 16
CAST, LARGEST = CastCodec(torch.float8_e4m3fn), torch.finfo(torch.float8_e4m3fn).max


class Float8Codec(Codec):
    """float8_e4m3 values with one fp32 scale per payload: | scale | values |. Codec says which rules it has to keep."""

    encoding_is_costly = True

    def payload_bytes(self, slice_shape: SliceShape) -> int:
        return SCALE_BYTES + CAST.payload_bytes(slice_shape)

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        blocks, exact = values.blocks.float(), values.exact.float()
        scales = torch.cat([blocks, exact], dim=1).abs().amax(dim=1, keepdim=True) / LARGEST  # of NaN if a value is NaN
        payloads[:, :4].view(torch.float32).copy_(scales)
        divisors = scales.clamp(min=1e-30)  # zeros stay zeros
        CAST.encode_into(Regions(blocks / divisors, exact / divisors), payloads[:, SCALE_BYTES:])

    def decode_into(self, payloads: Tensor, values: Regions) -> None:
        for part, decoded in zip(values.parts(), self._decoded(payloads, values.slice_shape), strict=True):
            part.copy_(decoded)

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        for part, decoded in zip(mean.parts(), self._decoded(payloads, mean.slice_shape), strict=True):
            mean_values(decoded, part, accumulate=accumulate)

    def _decoded(self, payloads: Tensor, slice_shape: SliceShape) -> list[Tensor]:
        scales = payloads[..., :4].view(torch.float32)
        return [part.float() * scales for part in CAST.regions_of(payloads[..., SCALE_BYTES:], slice_shape).parts()]


FLOAT8 = Float8Codec()


def make_codec(code: Code, dtype: torch.dtype, block_numel: int) -> Codec:
    """The engine calls this for each link. Here 8 bits mean float8."""
    return CastCodec(dtype) if code.is_exact else FLOAT8


def train(model: nn.Module, options: EngineOptions, backend: Backend) -> str:
    """Trains on one rank. Returns the first and the last loss, and the bytes that enter the rank's node per step."""
    engine = shard(copy.deepcopy(model), ["0", "2"], options, backend=backend)  # ranks are threads: each needs its own module
    losses = []
    for step in range(STEPS):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * engine.data_ranks + engine.data_rank))
        loss = (engine.module(inputs) - inputs.roll(1, dims=1)).square().mean()
        engine.backward(loss)
        engine.step(learning_rate=3e-3)
        losses.append(engine.gather_world(loss.detach().view(1)).mean().item())
    ledger = engine.links.ledger
    entering = ledger.inter_node_bytes(ledger.total(Category.WEIGHTS, Category.GRADIENTS)) // STEPS
    engine.close()
    return f"{entering} bytes into a node per step, loss {losses[0]:.4f} to {losses[-1]:.4f}"


torch.manual_seed(0)
world = VirtualWorld(Grid.of_nodes(nodes=2, ranks_per_node=2))
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
plain = EngineOptions(POLICIES[3])
between_nodes = LinkCodes(inter=Code(8), intra=EXACT)
coded = replace(plain, policy=replace(plain.policy, weight_codes=between_nodes, gradient_codes=between_nodes), make_codec=make_codec)
print("plain: ", world.run(partial(train, model, plain))[0])
print("float8:", world.run(partial(train, model, coded))[0])
