"""How the flags shard a model and divide its samples (no torch)."""

from __future__ import annotations

from megatron_zpp.comm.code import EXACT, Code, LinkCodes, Rotation, Rounding
from megatron_zpp.config.groups.zero import WORKING_DTYPE_BITS
from megatron_zpp.config.rules_zero import partition_ranks
from megatron_zpp.config.schema import Config, PrecisionConfig, ZeroConfig
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.policy import (
    MOMENTS,
    POLICIES,
    Policy,
    Rung,
    with_gradients_summed_on_secondary,
    with_offloaded_optimizer,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
    with_weight_differences,
)
from megatron_zpp.zero.schedule import Prefetch

_FP32_BYTES = 4
_INNER_BYTES = _FP32_BYTES * (1 + len(MOMENTS))  # of a main weight and its moments


def choose_policy(zero: ZeroConfig) -> Policy:
    """Policy that the flags ask for."""
    policy = POLICIES[zero.zero_stage]
    if zero.zero_quantized_weights:
        policy = with_quantized_weights(policy, Code(zero.zero_quantized_weights_bits))
    if zero.zero_hpz_partition_size > 1:
        policy = with_secondary_weights(policy)
    if zero.zero_quantized_weight_differences and policy.weights_in_step is not Rung.PRIMARY:  # primary: there is one rank in all
        policy = with_weight_differences(policy, Code.gaussian(zero.zero_quantized_weight_differences_bits, rounds=1))
    if zero.zero_quantized_gradients:
        policy = with_quantized_gradients(policy, _gradient_codes(zero))
    if zero.zero_gradients_between_microbatches == "secondary":
        policy = with_gradients_summed_on_secondary(policy)
    return with_offloaded_optimizer(policy) if zero.optimizer_cpu_offload else policy


def _gradient_codes(zero: ZeroConfig) -> LinkCodes:
    if zero.zero_quantized_gradients_code == "gaussian":
        # Few levels leave a bias in sparse blocks after one round of rotation, which a mean over many steps does not lose.
        inter_bits = zero.zero_quantized_gradients_inter_bits
        return LinkCodes(Code.gaussian(inter_bits, rounds=2 if inter_bits <= 2 else 1), Code(zero.zero_quantized_gradients_intra_bits))
    rotation, rounding = Rotation(zero.zero_quantized_gradients_rotation), Rounding(zero.zero_quantized_gradients_rounding)
    inter, intra = (
        EXACT if bits == WORKING_DTYPE_BITS else Code(bits, rotation, rounding)
        for bits in (zero.zero_quantized_gradients_inter_bits, zero.zero_quantized_gradients_intra_bits)
    )
    return LinkCodes(inter, intra)


def prefetch_of(zero: ZeroConfig) -> Prefetch:
    """How many uses ahead climbs are submitted, for each link."""
    return Prefetch(zero.zero_prefetch_units, zero.zero_prefetch_units_intra)


def element_bytes(precision: PrecisionConfig) -> int:
    """Bytes of a working weight."""
    return 2 if precision.bf16 or precision.fp16 else 4


def saved_bytes(config: Config, grid: Grid) -> int:
    """Bytes of one parameter in a checkpoint: its main weight, and unless --no-save-optim Adam's moments and a kept copy.

    With outer steps: its outer weight, and unless --no-save-optim outer momentum, outer copy, and main weight and moments of each island.
    grid: of one island.
    """
    if config.checkpoint.no_save_optim:
        return _FP32_BYTES
    if config.diloco.has_islands:
        return outer_saved_bytes(config) + config.diloco.diloco_islands * inner_saved_bytes(config)
    keeps_copy = choose_policy(config.zero).in_world(grid.ladder).keeps_copy
    return _INNER_BYTES + (element_bytes(config.precision) if keeps_copy else 0)


def outer_saved_bytes(config: Config) -> int:
    """Bytes of one parameter in a checkpoint that all islands share: its outer weight, and unless --no-save-optim momentum and copy."""
    return _FP32_BYTES if config.checkpoint.no_save_optim else 2 * _FP32_BYTES + element_bytes(config.precision)


def inner_saved_bytes(config: Config) -> int:
    """Bytes of one parameter in a checkpoint that each island has beside them."""
    return 0 if config.checkpoint.no_save_optim else _INNER_BYTES


def checkpoint_bytes(config: Config, grid: Grid, padded_vocab_size: int) -> int:
    """Bytes of a checkpoint."""
    return saved_bytes(config, grid) * parameter_count(config.model, padded_vocab_size)


def saved_between_nodes(config: Config, grid: Grid, padded_vocab_size: int) -> float:
    """Bytes of a save that enter a node: the one with the disk that all share, or each that has copies of files of others.

    grid: of one island.
    """
    nodes = config.diloco.diloco_islands * grid.nodes
    others = config.checkpoint.save_copies - 1 if config.checkpoint.node_local_checkpoints else nodes - 1
    return checkpoint_bytes(config, grid, padded_vocab_size) * others / nodes


def grid_of(config: Config, world_size: int) -> Grid:
    """Grid of one island in a resolved configuration, or of the world if that is one.

    A partition has --zero-hpz-partition-size ranks, or if that is 1, those of a node in one ladder.
    """
    distributed = config.distributed
    tensor_ranks, ranks_per_node = distributed.tensor_model_parallel_size, distributed.ranks_per_node
    of_partition = partition_ranks(config, ranks_per_node // tensor_ranks)
    island_ranks = world_size // config.diloco.diloco_islands
    return Grid(island_ranks, ranks_per_node, of_partition, tensor_ranks, distributed.context_parallel_size)


def world_size_of(config: Config, grid: Grid) -> int:
    """Ranks of all islands. grid: of one."""
    return grid.world_size * config.diloco.diloco_islands


def sample_groups_of(config: Config, grid: Grid) -> int:
    """Groups of ranks with samples of their own, of all islands. grid: of one."""
    return grid.sample_groups * config.diloco.diloco_islands


def column_grid(config: Config) -> Grid:
    """Grid of the ranks that have the same place on each island, each on a node of its own."""
    return Grid.of_nodes(config.diloco.diloco_islands, 1)


def shape_of(config: Config, padded_vocab_size: int) -> ModelShape:
    """The shape of one rank's part of the model. All ranks that share layers have parts of equal shapes."""
    tensor_ranks = config.distributed.tensor_model_parallel_size
    return ModelShape(config.model, padded_vocab_size, tensor_ranks, sequence_parallel=config.distributed.sequence_parallel)


def layouts_of(config: Config, padded_vocab_size: int, grid: Grid) -> list[FlatLayout]:
    """The layout of every unit."""
    specs = shape_of(config, padded_vocab_size).unit_specs()
    return [FlatLayout(spec.params, grid.data_ranks, config.zero.quantization_block_size) for spec in specs]
