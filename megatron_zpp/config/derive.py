"""Values that follow from other flags and from the world."""

from __future__ import annotations

from typing import Any, TypeVar

from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.schema import Config

T = TypeVar("T")


def derive(config: Config, world_size: int, local_world_size: int | None) -> Config:
    """The configuration with every None filled that depends on another flag or on the world.

    local_world_size: ranks that the launcher started on this node, None where it does not say.
    """
    config = config.with_values(**_model_values(config), **_batch_values(config, world_size))
    config = config.with_values(**_length_values(config))
    return config.with_values(
        **_decay_values(config),
        ranks_per_node=_ranks_per_node(config, world_size, local_world_size),
        profile_dir=_or(config.profiling.profile_dir, config.logging.tensorboard_dir),
        zero_hpz_partition_size=1 if world_size == 1 else config.zero.zero_hpz_partition_size,
    )


def _or(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _model_values(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "ffn_hidden_size": _or(model.ffn_hidden_size, 4 * model.hidden_size),
        "kv_channels": _or(model.kv_channels, model.hidden_size // model.num_attention_heads),
        "max_position_embeddings": _or(model.max_position_embeddings, model.seq_length),
    }


def _batch_values(config: Config, world_size: int) -> dict[str, Any]:
    micro_batch_size = _or(config.training.micro_batch_size, 1)
    return {
        "micro_batch_size": micro_batch_size,
        "global_batch_size": _or(config.training.global_batch_size, micro_batch_size * world_size),
    }


def _length_values(config: Config) -> dict[str, Any]:
    training = config.training
    if training.train_samples is None:
        return {}
    train_iters = training.train_samples // training.global_batch_size
    if train_iters == 0:
        raise FlagError(
            f"--train-samples {training.train_samples} is less than one global batch of {training.global_batch_size}; "
            f"choose {training.global_batch_size} or more."
        )
    return {"train_iters": train_iters}


def _decay_values(config: Config) -> dict[str, Any]:
    if config.training.train_samples is None:
        return {"lr_decay_iters": _or(config.optimizer.lr_decay_iters, config.training.train_iters)}
    return {"lr_decay_samples": _or(config.optimizer.lr_decay_samples, config.training.train_samples)}


def _ranks_per_node(config: Config, world_size: int, local_world_size: int | None) -> int:
    ranks_per_node = _or(config.distributed.ranks_per_node, local_world_size)
    if ranks_per_node is None and world_size > 1:
        raise FlagError(
            f"--ranks-per-node is not given and the launcher of these {world_size} ranks does not say it in LOCAL_WORLD_SIZE, "
            "LOCAL_SIZE or SLURM_NTASKS_PER_NODE; give --ranks-per-node."
        )
    return _or(ranks_per_node, 1)
