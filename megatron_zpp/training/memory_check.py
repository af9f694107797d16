"""Refuses a run that does not fit into the available memory, and names the smallest world that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from megatron_zpp.config.counted import counted, in_gib
from megatron_zpp.config.flag import any_of, divisors
from megatron_zpp.config.resolve import could_have
from megatron_zpp.config.rules_context import CONTEXT_SIZE
from megatron_zpp.config.rules_tensor import TENSOR_SIZE
from megatron_zpp.config.schema import Config, ZeroConfig
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.memory_need import MemoryNeed, memory_need
from megatron_zpp.training.plan.device_memory import NO_DEVICE, device_memory
from megatron_zpp.training.plan.kinds import ACTIVATIONS, KEPT_INPUTS
from megatron_zpp.training.sharding import column_grid, world_size_of

ISLANDS = "--diloco-islands"
LARGEST_NODES = 1 << 10  # of more, each would lessen hardly anything, and padding of small parts for so many ranks grows


class AvailableMemory(NamedTuple):
    """Bytes that each rank may use, the minimum over all ranks; None if unknown.

    device: memory that the rank computes in. host: memory of the host. Without a GPU both are the same memory.
    is_after_start: whether `device` is what is left of a GPU after the context of CUDA and the buffers of NCCL.
    """

    device: int | None
    host: int | None
    is_after_start: bool = False

    def holds(self, need: MemoryNeed) -> bool:
        """Whether a rank has room for `need`, as far as is known."""
        return (self.device is None or need.total <= self.device) and (self.host is None or need.host <= self.host)


def check_fits(config: Config, padded_vocab_size: int, grid: Grid, *, is_on_gpu: bool, available: AvailableMemory) -> MemoryNeed:
    """The memory that each rank of this run needs. Allocates nothing. grid: of the world, or of one island.

    Raises UserError if less memory is available; the text names the smallest world of such nodes that fits, or says that none does.
    """

    def need_with(config: Config, grid: Grid) -> MemoryNeed:
        return memory_need(config, padded_vocab_size, grid, is_on_gpu=is_on_gpu).beside(taken)

    def other(**flags: Any) -> MemoryNeed:
        return need_with(config.with_values(**flags), grid)

    taken = device_memory(grid, column_grid(config)) if is_on_gpu and available.is_after_start else NO_DEVICE
    need = need_with(config, grid)
    islands, world_size = config.diloco.diloco_islands, world_size_of(config, grid)
    ranks = f"each of the {world_size} ranks" if world_size > 1 else "the one rank"
    if is_on_gpu and available.host is not None and need.host > available.host:
        raise UserError(_host_is_too_small(config, need, ranks, available.host))
    nbytes = available.device
    if nbytes is None or need.total <= nbytes:
        return need

    together = max(1, grid.context_ranks // grid.ladder.ranks_per_node)  # nodes that only together have whole samples
    too_few = grid.nodes // together

    def total(times: int) -> int:
        if times == too_few:
            return need.total
        larger = replace(grid, world_size=times * together * grid.ranks_per_node)
        batch = config.training.global_batch_size * larger.sample_groups // grid.sample_groups  # of as many micro-batches per rank
        return need_with(config.with_values(global_batch_size=batch), larger).total

    # Otherwise no other world is planned: each takes a fraction of a second.
    may_fit = need.whatever_the_world <= nbytes and _may_have_more_nodes(config)
    most = max(LARGEST_NODES, 2 * too_few)
    times = smallest_nodes(total, nbytes, too_few, most) if may_fit else None
    first = []
    if config.model.attention_dropout > 0 and 2 * other(attention_dropout=0.0).of(ACTIVATIONS) < need.of(ACTIVATIONS):
        first.append("--attention-dropout 0")  # its kernel keeps scores of tokens x tokens
    if may_fit and is_on_gpu and _can_offload(config) and available.holds(other(optimizer_cpu_offload=True)):
        first.append("--optimizer-cpu-offload")
    keeps_inputs = config.model.recompute_granularity == "full" and not config.model.checkpoint_in_cpu
    if is_on_gpu and keeps_inputs and available.holds(other(checkpoint_in_cpu=True)):
        first.append("--checkpoint-in-cpu")
    if may_fit:
        first += _fewer_islands(config, grid, lambda config, grid: available.holds(need_with(config, grid)))
    levers = _levers(config, padded_vocab_size, grid, need, first, fits_more_nodes=times is not None)
    on_island = " on each island" if config.diloco.has_islands else ""
    if times is not None:
        world = f"{counted(islands * times * together, 'node')} of {counted(grid.ranks_per_node, 'rank')}"
        others = f", or give {any_of(levers)}" if levers else ""
        nodes = f", {times * together} of them{on_island} ({ISLANDS} {islands})" if on_island else ""
        remedy = f"the smallest world that fits is {world} with this much memory each{nodes}{others}"
    else:
        none_fits = f"not even {most * together} such nodes{on_island} are enough" if may_fit else "no number of such nodes is enough"
        remedy = f"{none_fits}; choose {any_of([*levers, 'a smaller model'])}"
    memory = "free GPU memory" if available.is_after_start else "GPU memory" if is_on_gpu else "host memory"
    raise UserError(f"{ranks} needs {in_gib(need.total)} of memory ({need}) and has {in_gib(nbytes)} of {memory}; {remedy}.")


def _fewer_islands(config: Config, grid: Grid, fits: Callable[[Config, Grid], bool]) -> list[str]:
    """The most islands, fewer than now and of more nodes each, with which the run fits into the same world; empty if none do."""
    fewer = divisors(config.diloco.diloco_islands)[-2:0:-1]
    larger = ((islands, replace(grid, world_size=world_size_of(config, grid) // islands)) for islands in fewer)
    fitting = (islands for islands, of_island in larger if fits(config.with_values(diloco_islands=islands), of_island))
    return [f"{ISLANDS} {islands}" for islands in islice(fitting, 1)]


def _host_is_too_small(config: Config, need: MemoryNeed, ranks: str, host_bytes: int) -> str:
    takers = ["--optimizer-cpu-offload"] if config.zero.optimizer_cpu_offload else []
    takers += ["--checkpoint-in-cpu"] if need.tensors.on_host.get(KEPT_INPUTS) else []
    takers += ["--async-save"] if need.save_copy else []
    more_nodes = "take more nodes for each island" if config.diloco.has_islands else "take more nodes"
    if takers == ["--async-save"]:
        return (
            f"--async-save needs {in_gib(need.save_copy)} of pinned host memory on {ranks}, for a copy of the state that is saved, but "
            f"only {in_gib(host_bytes)} is available; leave --async-save out, or {more_nodes}."
        )
    # More nodes do not lessen the inputs that a rank keeps.
    remedy = more_nodes if takers != ["--checkpoint-in-cpu"] else "raise --recompute-num-layers"
    return (
        f"{', '.join(takers)}: {ranks} needs {in_gib(need.host)} of host memory ({need.on_host()}) and has {in_gib(host_bytes)}; "
        f"{remedy}, or leave {any_of(takers)} out."
    )


def smallest_nodes(total: Callable[[int], int], available: int, too_few: int, enough: int) -> int | None:
    """Smallest number of nodes from above `too_few` to `enough` that need no more than `available` bytes; None if even `enough` need more.

    total: bytes that so many nodes need. More nodes need less: nearly a constant, and a part that they divide. The search expects that, so
    that it plans few worlds, but relies only on less.
    """
    most, least = total(too_few), total(enough)
    if least > available:
        return None
    while enough - too_few > 1:
        share = (available - least) / (most - least)
        middle = int(1 / ((1 - share) / enough + share / too_few))
        middle = min(max(middle, too_few + 1), enough - 1)
        nbytes = total(middle)
        if nbytes <= available:
            enough, least = middle, nbytes
        else:
            too_few, most = middle, nbytes
    return enough


def _levers(
    config: Config, padded_vocab_size: int, grid: Grid, need: MemoryNeed, first: Sequence[str], *, fits_more_nodes: bool
) -> list[str]:
    """Flags that lessen what a rank needs. first: those to name before others, such as those of which each makes the run fit."""
    levers = [*first]
    levers += [] if config.model.recompute_granularity == "full" else ["--checkpoint-activations"]
    levers += ["--loss-chunk-tokens 1024"] if config.model.loss_chunk_tokens == 0 else []
    levers += ["no --async-save"] if need.save_copy_on_device else []
    levers += ["--zero-gradients-between-microbatches primary"] if config.zero.zero_gradients_between_microbatches == "secondary" else []
    levers += _sequence_parallel(config, grid.tensor_ranks)
    can_divide_weights = grid.ranks_per_node > grid.tensor_ranks or not config.zero.zero_quantized_weight_differences
    levers += ["--zero-stage 3"] if config.zero.zero_stage != 3 and can_divide_weights else []
    if not fits_more_nodes:
        levers += _lever_without_copy(config.zero)
        levers += _larger_tensor_size(config, padded_vocab_size, grid)
        levers += _larger_context_size(config, grid) if need.of(ACTIVATIONS) > need.total // 2 else []
        levers += [] if config.training.micro_batch_size == 1 else ["a smaller --micro-batch-size"]
    return levers


def _lever_without_copy(zero: ZeroConfig) -> list[str]:
    """What to choose for a smaller secondary copy or none; empty if the run has none."""
    if zero.zero_hpz_partition_size == 1:
        return []
    if zero.zeropp is not None:  # both keep a copy: paper in 8 bits, lean in 16
        return ["--zeropp paper"] if zero.zero_quantized_weight_differences else ["--zero-stage 3 without --zeropp"]
    return ["no --zero-quantized-weight-differences"] if zero.zero_quantized_weight_differences else ["--zero-hpz-partition-size 1"]


def _larger_tensor_size(config: Config, padded_vocab_size: int, grid: Grid) -> list[str]:
    """The next number of ranks that could share the layers of this run; empty if there is none."""
    larger = (size for size in divisors(grid.ranks_per_node) if size > grid.tensor_ranks and padded_vocab_size % size == 0)
    fitting = (size for size in larger if could_have(config, world_size_of(config, grid), tensor_model_parallel_size=size))
    return [f"{TENSOR_SIZE} {size}" for size in fitting][:1]


def _larger_context_size(config: Config, grid: Grid) -> list[str]:
    """The next number of ranks that could divide the samples of this run; empty if there is none."""
    larger = (size for size in divisors(grid.data_ranks) if size > grid.context_ranks)
    fitting = (size for size in larger if could_have(config, world_size_of(config, grid), context_parallel_size=size))
    return [f"{CONTEXT_SIZE} {size}" for size in fitting][:1]


def _may_have_more_nodes(config: Config) -> bool:
    """Whether an island of this run may have more ranks (config/rules_diloco.py). A world without islands may."""
    zero = config.zero
    return not config.diloco.has_islands or (zero.zero_stage > 0 and not zero.zero_quantized_weight_differences)


def _sequence_parallel(config: Config, tensor_ranks: int) -> list[str]:
    """Sequence parallelism, if the run could have it and has not; otherwise empty."""
    parts = tensor_ranks * config.distributed.context_parallel_size
    has_parts = tensor_ranks > 1 and config.model.seq_length % parts == 0
    return ["--sequence-parallel"] if has_parts and not config.distributed.sequence_parallel else []


def _can_offload(config: Config) -> bool:
    """Whether the run could have --optimizer-cpu-offload, and has not."""
    has_owners = config.zero.zero_stage > 0 and config.optimizer.optimizer_backend == "torch"
    return has_owners and not config.zero.optimizer_cpu_offload
