"""From flags to the way units are sharded (no torch): what the engine and every plan of a run start from."""

from __future__ import annotations

from megatron_zpp.config.schema import Config, PrecisionConfig, ZeroConfig
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.memory_plan import Sharding
from megatron_zpp.zero.policy import (
    POLICIES,
    CodeOptions,
    Policy,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
)
from megatron_zpp.zero.schedule import Prefetch


def sharding_of(config: Config) -> Sharding:
    """How a resolved configuration shards its units."""
    zero = config.zero
    return Sharding(choose_policy(zero), zero.quantization_block_size, element_bytes(config.precision), prefetch_of(zero))


def choose_policy(zero: ZeroConfig) -> Policy:
    """The row of the policy table that the flags ask for."""
    policy = POLICIES[zero.zero_stage]
    if zero.zero_quantized_weights:
        policy = with_quantized_weights(policy, zero.zero_quantized_weights_bits)
    if zero.zero_hpz_partition_size > 1:
        policy = with_secondary_weights(policy)
    if zero.zero_quantized_gradients:
        options = CodeOptions(
            is_rotated=zero.zero_quantized_gradients_rotation == "hadamard",
            is_stochastic=zero.zero_quantized_gradients_rounding == "stochastic",
        )
        intra_bits, inter_bits = zero.zero_quantized_gradients_intra_bits, zero.zero_quantized_gradients_inter_bits
        policy = with_quantized_gradients(policy, intra_bits, inter_bits, options)
    return policy


def prefetch_of(zero: ZeroConfig) -> Prefetch:
    """How far climbs run ahead."""
    return Prefetch(zero.zero_prefetch_units, zero.zero_prefetch_units_intra)


def element_bytes(precision: PrecisionConfig) -> int:
    """Bytes of a working weight."""
    return 2 if precision.bf16 or precision.fp16 else 4


def topology_of(config: Config, world_size: int) -> Topology:
    """The ranks of a resolved configuration as nodes; a node of the ladder is an hpZ partition where there is one."""
    ranks_per_node, partition_ranks = config.distributed.ranks_per_node, config.zero.zero_hpz_partition_size
    return Topology(world_size, ranks_per_node, partition_ranks if partition_ranks > 1 else ranks_per_node)
