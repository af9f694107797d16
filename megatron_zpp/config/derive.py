"""Values that follow from other flags and from the world."""

from __future__ import annotations

from typing import Any, TypeVar

from megatron_zpp.config.batch_schedule import batch_schedule, running_schedule
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.horizons import length_in_samples
from megatron_zpp.config.schema import Config, ModelConfig

T = TypeVar("T")


def derive(config: Config, world_size: int, local_world_size: int | None) -> Config:
    """The configuration with every None filled that depends on another flag or on the world.

    local_world_size: ranks that the launcher started on this node, None where it does not say.
    """
    config = config.with_values(**_model_values(config), **_batch_values(config, world_size), **_values_of_tokens(config))
    config = config.with_values(**_evaluation_values(config, world_size), **_length_values(config, world_size))
    return config.with_values(
        **_decay_values(config),
        **_weight_decay_values(config),
        ranks_per_node=_ranks_per_node(config, world_size, local_world_size),
        device=_or(config.plan.device, "cpu" if config.distributed.distributed_backend == "gloo" else "gpu"),
        profile_dir=_or(config.profiling.profile_dir, config.logging.tensorboard_dir),
        zero_hpz_partition_size=1 if world_size == 1 else config.zero.zero_hpz_partition_size,
    )


def _or(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _model_values(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "position_embedding_type": _position_embedding_type(config),
        "num_query_groups": _or(model.num_query_groups, 1 if model.group_query_attention else model.num_attention_heads),
        "ffn_hidden_size": _or(model.ffn_hidden_size, _ffn_hidden_size(config)),
        "kv_channels": _or(model.kv_channels, model.hidden_size // model.num_attention_heads),
        "max_position_embeddings": _or(model.max_position_embeddings, model.seq_length),
        **_recompute_values(model),
    }


def _recompute_values(model: ModelConfig) -> dict[str, Any]:
    if model.recompute_granularity != "full":
        return {}
    return {
        "recompute_method": _or(model.recompute_method, "uniform"),
        "recompute_num_layers": _or(model.recompute_num_layers, 1),
    }


def _position_embedding_type(config: Config) -> str:
    model = config.model
    return "none" if model.no_position_embedding and "position_embedding_type" not in config.given else model.position_embedding_type


def _ffn_hidden_size(config: Config) -> int:
    """4 H; two thirds of it where a gate adds a third matrix, in multiples of 64 as Megatron has it."""
    hidden = config.model.hidden_size
    if not config.model.swiglu:
        return 4 * hidden
    width = int(4 * hidden * 2 / 3 / 64) * 64
    if width == 0:
        raise FlagError(
            f"--swiglu with --hidden-size {hidden} leaves the feed-forward layer no width, because two thirds of 4 x {hidden} are rounded "
            "down to a multiple of 64; give --ffn-hidden-size."
        )
    return width


def _batch_values(config: Config, world_size: int) -> dict[str, Any]:
    training = config.training
    micro_batch_size = _or(training.micro_batch_size, 1)
    full_size = _or(training.global_batch_size, micro_batch_size * world_size)
    if training.step_batch_size_schedule is not None:
        full_size = batch_schedule(training, config.model.seq_length).stages[-1].wished_size
    return {"micro_batch_size": micro_batch_size, "global_batch_size": full_size}


def _values_of_tokens(config: Config) -> dict[str, Any]:
    """What is given in tokens, in samples."""
    training, optimizer, seq_length = config.training, config.optimizer, config.model.seq_length
    values: dict[str, Any] = {}
    if training.train_tokens is not None:
        samples = -(-training.train_tokens // seq_length)
        values["train_samples"] = min(samples, _or(training.train_samples, samples))
    if optimizer.lr_decay_tokens is not None:
        values["lr_decay_samples"] = -(-optimizer.lr_decay_tokens // seq_length)
    if optimizer.lr_warmup_tokens:
        values["lr_warmup_samples"] = -(-optimizer.lr_warmup_tokens // seq_length)
    return values


def _evaluation_values(config: Config, world_size: int) -> dict[str, Any]:
    training = config.training
    micro_batch_size = _or(training.eval_micro_batch_size, training.micro_batch_size)
    size = _or(training.eval_global_batch_size, running_schedule(config, world_size).full_size)
    return {"eval_micro_batch_size": micro_batch_size, "eval_global_batch_size": size}


def _length_values(config: Config, world_size: int) -> dict[str, Any]:
    training = config.training
    if training.train_samples is None:
        return {}
    batches = running_schedule(config, world_size)
    train_iters = batches.iterations_within(training.train_samples)
    if train_iters == 0:
        smallest = batches.batch_size(0)
        raise FlagError(f"--train-samples {training.train_samples} is less than one global batch of {smallest}; choose {smallest} or more.")
    return {"train_iters": train_iters}


def _decay_values(config: Config) -> dict[str, Any]:
    if config.training.train_samples is None:
        return {"lr_decay_iters": _or(config.optimizer.lr_decay_iters, config.training.train_iters)}
    return {"lr_decay_samples": _or(config.optimizer.lr_decay_samples, config.training.train_samples)}


def _weight_decay_values(config: Config) -> dict[str, Any]:
    optimizer = config.optimizer
    length = length_in_samples(config.training, config.model.seq_length)
    return {
        "start_weight_decay": _or(optimizer.start_weight_decay, optimizer.weight_decay),
        "end_weight_decay": _or(optimizer.end_weight_decay, optimizer.weight_decay),
        "weight_decay_incr_samples": _or(optimizer.weight_decay_incr_samples, length),
    }


def _ranks_per_node(config: Config, world_size: int, local_world_size: int | None) -> int:
    ranks_per_node = _or(config.distributed.ranks_per_node, local_world_size)
    if ranks_per_node is None and world_size > 1:
        raise FlagError(
            f"--ranks-per-node is not given and the launcher of these {world_size} ranks does not say it in LOCAL_WORLD_SIZE, "
            "LOCAL_SIZE or SLURM_NTASKS_PER_NODE; give --ranks-per-node."
        )
    return _or(ranks_per_node, 1)
