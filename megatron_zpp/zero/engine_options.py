"""The options of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from megatron_zpp.comm.codecs import CodecFactory, LinkCodecs, make_codec
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.policy import POLICIES, Policy
from megatron_zpp.zero.schedule import Prefetch


@dataclass(frozen=True)
class EngineOptions:
    """How the engine shards and trains.

    dtype: of the working weights and their gradients. clip_grad: largest global gradient norm, 0 for no clipping.
    full_precision_iterations: number of steps at the start of a run in which nothing is quantized.
    noise_seed: of stochastic rounding and of the signs of rotations. counts_zeros: whether a step counts the zeros of the mean gradient.
    make_codec: makes the codec of each link (comm/codecs.py).
    observer: receives the phases of a step, and each use while it is computed.
    """

    policy: Policy = POLICIES[3]
    dtype: torch.dtype = torch.float32
    block_numel: int = 256
    prefetch: Prefetch = Prefetch()
    adam: AdamOptions = AdamOptions()
    clip_grad: float = 1.0
    full_precision_iterations: int = 0
    noise_seed: int = 0
    counts_zeros: bool = False
    make_codec: CodecFactory = make_codec
    observer: Observer = field(default_factory=Observer)

    def for_frozen(self) -> EngineOptions:
        """The options of units whose weights no step changes."""
        return replace(self, policy=self.policy.for_frozen())

    def compared(self) -> dict[str, object]:
        """What ranks that train together must have alike. Observers may differ."""
        fields = {name: value for name, value in vars(self).items() if name != "observer"}
        return {**fields, "make_codec": getattr(self.make_codec, "__qualname__", type(self.make_codec).__name__)}

    def codecs(self, iteration: int) -> tuple[LinkCodecs, LinkCodecs]:
        """The codecs of weights and those of gradients, after `iteration` steps. The policy must be that of the world."""
        policy = self.policy.in_full_precision() if iteration < self.full_precision_iterations else self.policy
        weights, gradients = (
            LinkCodecs.of(codes, self.dtype, self.block_numel, self.noise_seed, self.make_codec)
            for codes in (policy.weight_codes, policy.gradient_codes)
        )
        return weights, gradients
