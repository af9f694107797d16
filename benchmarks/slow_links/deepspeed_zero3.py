"""Trains the same GPT with DeepSpeed's ZeRO-3 over gloo: bf16, fused AdamW on fp32 weights, gradients reduced in every micro-batch.

Its ZeRO++ is left out: quantization there needs CUDA kernels. DeepSpeed is imported only where it is measured.
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

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.parallel.initialize import World
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.training import setup
from slow_links.fsdp2 import fused_adamw
from slow_links.ours import microbatches, same_batch

PACKAGE = "deepspeed"


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


def settings(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a step like ours. All parameters are sharded, and each unit is gathered for its use alone."""
    return {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": microbatches(config, world_size),
        "gradient_clipping": config.optimizer.clip_grad,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1_000_000_000,
    }


class DeepSpeedTraining:
    """Makes the same step as our engine with DeepSpeed: mean gradient of the micro-batches, clipped, fp32 main weights, mean loss."""

    def __init__(self, flags: Sequence[str], launch: Launch, world: World) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it when it is imported
        deepspeed = importlib.import_module(PACKAGE)
        config = resolve(parse_flags(flags), launch.world_size, launch.local_world_size)
        padded_vocab = setup.build_vocabulary(config).padded_size
        model = materialize(GPT(config.model, padded_vocab, config.training.seed, torch.float32), world.device)
        # The process group of this rank exists already, and DeepSpeed uses it.
        self._engine = deepspeed.initialize(
            model=model,
            optimizer=fused_adamw(model, config.optimizer),
            config=settings(config, launch.world_size),
            dist_init_required=None,
        )[0]
        self._batches = same_batch(config, launch.rank)
        self._microbatches = microbatches(config, launch.world_size)

    def step(self) -> float:
        """The loss of one training step."""
        self._engine.train()
        total = torch.zeros(1, dtype=torch.float64)
        for _ in range(self._microbatches):
            batch = next(self._batches)
            loss = self._engine(batch.tokens, batch.labels, first_sample=batch.first_sample).mean()
            self._engine.backward(loss)  # divides by the number of micro-batches
            self._engine.step()  # updates weights after the last micro-batch of a step alone
            total += loss.detach().double() / self._microbatches
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def drain(self) -> None:
        """Does nothing: after a step DeepSpeed has no collective under way."""

    def node_bytes(self) -> dict[str, int]:
        """Empty: DeepSpeed does not count bytes by node."""
        return {}

    def close(self) -> None:
        """Does nothing: DeepSpeed has no threads of its own here, and its groups end with the process."""
