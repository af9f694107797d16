"""Trains the same GPT with DeepSpeed's ZeRO-3: bf16, fused AdamW on fp32 weights, gradients reduced in every micro-batch.

Of its ZeRO++ only the secondary copies (hpZ) run without a GPU: its quantization has no code for a CPU. DeepSpeed is imported only where it
is measured.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.slow_links.batches import microbatches, same_batches
from benchmarks.slow_links.configurations import DEEPSPEED_HPZ, DEEPSPEED_KEPT
from benchmarks.slow_links.fsdp2 import fused_adamw
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.parallel.initialize import World
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.training import setup

PACKAGE = "deepspeed"
LIVE_UNITS = 2  # the block that computes, and the next one


def check_installed() -> None:
    """Raises ValueError if DeepSpeed is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ValueError(f"--peers deepspeed needs the package {PACKAGE}, which is not installed; install it, or leave deepspeed out.")


def installed_version() -> str | None:
    """The version of DeepSpeed; None if it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def load(device: torch.device) -> Any:
    """The package. DeepSpeed reads its device from the environment when it is imported."""
    os.environ["DS_ACCELERATOR"] = device.type
    return importlib.import_module(PACKAGE)


def settings(name: str, config: Config, launch: Launch, unit_numel: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a step like ours. unit_numel: parameters of a block, which is what FSDP2 and we gather at once.

    DeepSpeed's limits of what stays gathered are 1e9 parameters. So it would keep all weights of a small model from forward to backward,
    as it does in DEEPSPEED_KEPT. In the others the limits have the proportion to the model that they have in large ones.
    """
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": unit_numel,
        "stage3_prefetch_bucket_size": unit_numel,
    }
    if name != DEEPSPEED_KEPT:
        zero |= {"stage3_max_live_parameters": LIVE_UNITS * unit_numel, "stage3_max_reuse_distance": 0}
    if name == DEEPSPEED_HPZ:
        zero["zero_hpz_partition_size"] = launch.local_world_size
    return {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": microbatches(config, launch.world_size),
        "gradient_clipping": config.optimizer.clip_grad,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000_000,
    }


class DeepSpeedTraining:
    """Makes the same step as our engine with DeepSpeed: mean gradient of the micro-batches, clipped, fp32 main weights, mean loss.

    DeepSpeed copies its main weights from the weights in bf16, so its losses are those of a model whose initial weights are rounded.
    """

    def __init__(self, name: str, flags: Sequence[str], launch: Launch, world: World) -> None:
        config = resolve(parse_flags(flags), launch.world_size, launch.local_world_size)
        padded_vocab = setup.build_vocabulary(config).padded_size
        model = materialize(GPT(config.model, padded_vocab, config.training.seed, torch.float32), world.device)
        # The process group of this rank exists already, and DeepSpeed uses it.
        self._engine = load(world.device).initialize(
            model=model,
            optimizer=fused_adamw(model, config.optimizer),
            config=settings(name, config, launch, sum(weight.numel() for weight in model.blocks[0].parameters())),
            dist_init_required=None,
        )[0]
        self._device = world.device
        self._batches = same_batches(config, [launch.rank])
        self._microbatches = microbatches(config, launch.world_size)

    def step(self) -> float:
        """The loss of one training step."""
        self._engine.train()
        total = torch.zeros(1, dtype=torch.float64)
        for _ in range(self._microbatches):
            batch = next(self._batches)
            losses = self._engine(batch.tokens.to(self._device), batch.labels.to(self._device), first_sample=batch.first_sample)
            loss = losses.mean()
            self._engine.backward(loss)  # divides by the number of micro-batches
            self._engine.step()  # updates weights after the last micro-batch of a step alone
            total += loss.detach().double().cpu() / self._microbatches
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def drain(self) -> None:
        """Does nothing: after a step DeepSpeed has no collective under way."""

    def node_bytes(self) -> dict[str, int]:
        """Empty: DeepSpeed does not count bytes by node."""
        return {}

    def close(self) -> None:
        """Does nothing: DeepSpeed has no threads of its own here, and its groups end with the process."""
