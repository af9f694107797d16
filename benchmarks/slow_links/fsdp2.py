"""Trains the same GPT with PyTorch's FSDP2: bf16 parameters and reduction, resharded after forward, one unit per block, fused AdamW."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.loss_study.text import mean_loss
from benchmarks.slow_links.batches import Batches, microbatches, same_batches
from benchmarks.slow_links.ours import EVALUATED_TOGETHER, LearningRates
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import OptimizerConfig
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.parallel.initialize import World
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.training import setup


class Fsdp2Training:
    """Makes the same step as our engine with FSDP2: mean gradient of the micro-batches, clipped, fp32 main weights, mean loss of all ranks.

    Gradients are reduced in every micro-batch, as in ZeRO-3.
    """

    def __init__(self, flags: Sequence[str], launch: Launch, world: World, batches: Batches = same_batches) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # imports the compiler

        config = resolve(parse_flags(flags), launch.world_size, launch.local_world_size)
        padded_vocab = setup.build_vocabulary(config).padded_size
        mesh = init_device_mesh(world.device.type, (launch.world_size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = materialize(GPT(config.model, padded_vocab, config.training.seed, torch.float32), world.device)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self._model = model
        self._device = world.device
        self._optimizer = fused_adamw(model, config.optimizer)
        self._clip_grad = config.optimizer.clip_grad
        self._batches = batches(config, [launch.rank])
        self._microbatches = microbatches(config, launch.world_size)
        self._rates = LearningRates(config)

    def step(self) -> float:
        """The loss of one training step."""
        self._model.train()
        total = torch.zeros(1, dtype=torch.float64)
        for _ in range(self._microbatches):
            batch = next(self._batches)
            losses = self._model(batch.tokens.to(self._device), batch.labels.to(self._device), first_sample=batch.first_sample)
            loss = losses.mean()
            (loss / self._microbatches).backward()
            total += loss.detach().double().cpu() / self._microbatches
        rate = self._rates.next()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def drain(self) -> None:
        """Does nothing: after a step FSDP2 has no collective under way."""

    def mean_loss(self, tokens: Tensor, labels: Tensor) -> float:
        """The mean loss of samples [samples, length]. Every rank needs as many."""
        return mean_loss(self._model, tokens, labels, EVALUATED_TOGETHER)

    def node_bytes(self) -> dict[str, int]:
        """Empty: FSDP2 does not count bytes."""
        return {}

    def close(self) -> None:
        """Does nothing: FSDP2 has no threads or groups of its own."""


def fused_adamw(model: nn.Module, options: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW of the flags, which decays parameters of two or more dimensions."""
    decaying = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decaying, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
        fused=True,
    )
