"""Computes the memory that each rank needs, compares it with the available memory, and finds the smallest world that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from megatron_zpp.config.counted import counted
from megatron_zpp.config.flag import any_of, divisors
from megatron_zpp.config.resolve import could_have
from megatron_zpp.config.rules_context import CONTEXT_SIZE
from megatron_zpp.config.rules_tensor import TENSOR_SIZE
from megatron_zpp.config.schema import CheckpointConfig, Config, ZeroConfig
from megatron_zpp.model.activations import ActivationNeed, activation_need, mask_bytes
from megatron_zpp.model.block_memory import AttentionNeed, RankShare
from megatron_zpp.model.kept_need import NOTHING_KEPT, KeptNeed, kept_need
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.training.sharding import kept_shape
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.plan.device_memory import NO_DEVICE, DeviceMemory, device_memory
from megatron_zpp.zero.plan.memory_plan import ADAM_MOMENTS, MAIN_BYTES, MemoryPlan, Sharding, largest_plan
from megatron_zpp.zero.policy import with_offloaded_optimizer
from megatron_zpp.zero.shared_places import most_shared_numel, sharing_buffer_bytes

LARGEST_NODES = 1 << 14


class SizedModel(Protocol):
    """The part of a model that plans use: of model.gpt.GPT, or of model.shapes.ModelShape, which needs no torch."""

    @property
    def padded_vocab_size(self) -> int: ...

    def unit_specs(self) -> tuple[UnitSpec, ...]: ...

    def uses(self) -> tuple[Use, ...]: ...


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


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one rank needs: the plan of its sharded states, an estimate of its activations, and of a GPU's memory beside tensors.

    at_peaks: activations, with what ranks that share layers or divide samples exchange. sharing: what it takes once per step to make equal
    the gradients of elements that several tensor ranks have; no activations exist then. kept_inputs: of recomputed chunks; what passes is
    part of the activations. save_copy: bytes of host memory for --async-save's copy of the state. With is_on_gpu they are not part of
    `total`, nor is plan.host.
    """

    plan: MemoryPlan
    at_peaks: ActivationNeed
    save_copy: int = 0
    is_on_gpu: bool = False
    device: DeviceMemory = NO_DEVICE
    kept_inputs: KeptNeed = NOTHING_KEPT
    sharing: int = 0

    @property
    def total(self) -> int:
        """Peak bytes on the device: in a step, or after it, when gradients are made equal or their norm is computed."""
        at_rest = self.plan.states + self.plan.buffers + self.save_copy_on_device + self.device.total + self.kept_inputs.lasting
        at_rest += 0 if self.is_on_gpu else self.plan.host.total
        return at_rest + max(self.in_step, self.plan.norm, self.sharing)

    @property
    def in_step(self) -> int:
        """The most bytes of gathered units, activations and means that exist at once."""
        return self.gathered + self.activations + self.plan.means

    @property
    def gathered(self) -> int:
        """Bytes of the units that are full when these and activations together have their peak."""
        return self.plan.gathered_in_blocks if self._peaks_in_blocks else self.plan.gathered

    @property
    def activations(self) -> int:
        """Bytes of activations at the peak of them and gathered units together."""
        return self.at_peaks.in_blocks if self._peaks_in_blocks else self.at_peaks.elsewhere

    @property
    def _peaks_in_blocks(self) -> bool:
        return self.plan.gathered_in_blocks + self.at_peaks.in_blocks > self.plan.gathered + self.at_peaks.elsewhere

    def beside(self, taken: DeviceMemory) -> MemoryNeed:
        """The need that is left if `taken` has been taken at the start of a run. The rest comes from torch's allocator."""
        return replace(self, device=self.device.beside(taken))

    @property
    def weights(self) -> int:
        """Bytes of `total` for main weights, and for working weights that are kept on the full rung."""
        return self.plan.weights + (0 if self.is_on_gpu else self.plan.host.weights)

    @property
    def optimizer_state(self) -> int:
        """Bytes of `total` for Adam's moments."""
        return self.plan.optimizer_state + (0 if self.is_on_gpu else self.plan.host.optimizer_state)

    @property
    def host(self) -> int:
        """Bytes in the memory of a GPU's host; without a GPU they are part of `total`."""
        return self.plan.host.total + self.save_copy + self.kept_inputs.host if self.is_on_gpu else 0

    def on_host(self) -> str:
        """The parts of `host` in words."""
        host = self.plan.host
        return _in_words(
            {
                "main weights": host.weights,
                "Adam's moments": host.optimizer_state,
                "mirrors of kept copies": host.mirrors,
                "pinned staging": host.pinned,
                "fp32 differences": host.differences,
                "inputs of recomputed chunks": self.kept_inputs.host,
                "copy for --async-save": self.save_copy,
            }
        )

    @property
    def save_copy_on_device(self) -> int:
        """Bytes of `total` for the copy of --async-save."""
        return 0 if self.is_on_gpu else self.save_copy

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.plan.gradients,
            "optimizer state": self.optimizer_state,
            "secondary copy": self.plan.secondary,
            "gathered units": self.gathered,
            "payload buffers": self.plan.buffers,
            "fp32 means": self.plan.means,
            "inputs of recomputed chunks": self.kept_inputs.lasting,
            "CUDA context and workspaces": self.device.context + self.device.workspaces,
            "NCCL buffers": self.device.communicators,
            "copy for --async-save": self.save_copy_on_device,
        }
        return f"{_in_words(parts)}, activations about {in_gib(self.activations)}"


def _in_words(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {in_gib(nbytes)}" for name, nbytes in parts.items() if in_gib(nbytes) != in_gib(0))


def check_fits(
    config: Config, model: SizedModel, sharding: Sharding, grid: Grid, *, is_on_gpu: bool, available: AvailableMemory
) -> MemoryNeed:
    """The memory that each rank of this run needs. Allocates nothing.

    Raises ValueError if less memory is available; the text names the smallest world of such nodes that fits, or says that none does.
    """
    need = memory_need(config, model, sharding, grid, is_on_gpu=is_on_gpu)
    taken = need.device if available.is_after_start else NO_DEVICE
    need = need.beside(taken)
    ranks = f"each of the {grid.world_size} ranks" if grid.world_size > 1 else "the one rank"
    if is_on_gpu and available.host is not None and need.host > available.host:
        raise ValueError(_host_is_too_small(config, need, ranks, available.host))
    nbytes = available.device
    if nbytes is None or need.total <= nbytes:
        return need

    together = max(1, grid.context_ranks // grid.ladder.ranks_per_node)  # nodes that only together have whole samples

    def fits(times: int) -> bool:
        larger = replace(grid, world_size=times * together * grid.ranks_per_node)  # of more data ranks
        return memory_need(config, model, sharding, larger, is_on_gpu=is_on_gpu).beside(taken).total <= nbytes

    # More ranks do not lessen the activations of one, and each plan of a deep model takes a second.
    may_fit = need.activations + need.kept_inputs.lasting <= nbytes
    times = smallest_nodes(fits, grid.nodes // together) if may_fit else None
    nodes = None if times is None else times * together
    first = _attention_dropout(config, model, sharding, grid, need)
    if may_fit and is_on_gpu and _can_offload(config):
        offloaded = replace(sharding, policy=with_offloaded_optimizer(sharding.policy))
        less = memory_need(config, model, offloaded, grid, is_on_gpu=True).beside(taken)
        first += ["--optimizer-cpu-offload"] * available.holds(less)
    if is_on_gpu and config.model.recompute_granularity == "full" and not config.model.checkpoint_in_cpu:
        less = _of_inputs(need, config.with_values(checkpoint_in_cpu=True), model, grid, sharding.element_bytes)
        first += ["--checkpoint-in-cpu"] * available.holds(less)
    memory = "free GPU memory" if available.is_after_start else "GPU memory" if is_on_gpu else "host memory"
    raise ValueError(
        f"{ranks} needs {in_gib(need.total)} of memory ({need}) and has {in_gib(nbytes)} of {memory}; "
        f"{_remedy(config, model, nodes, grid, need, first)}."
    )


def _attention_dropout(config: Config, model: SizedModel, sharding: Sharding, grid: Grid, need: MemoryNeed) -> list[str]:
    """The flag against attention dropout, if most of the activations exist because its kernel keeps scores of tokens x tokens."""
    without = config.with_values(attention_dropout=0.0)
    if _attention_need(without, sharding.element_bytes, is_on_gpu=need.is_on_gpu).keeps_scores:
        return []
    less = replace(need, at_peaks=_activations(without, model, grid, sharding.element_bytes, is_on_gpu=need.is_on_gpu))
    return ["--attention-dropout 0"] * (2 * less.activations < need.activations)


def _of_inputs(need: MemoryNeed, config: Config, model: SizedModel, grid: Grid, element_bytes: int) -> MemoryNeed:
    """The need of a run on GPUs with the flags of `config`, from that of one which keeps inputs of recomputed chunks elsewhere."""
    inputs = _kept_inputs(config, grid, element_bytes, is_on_gpu=True)
    return replace(need, kept_inputs=inputs, at_peaks=_activations(config, model, grid, element_bytes, is_on_gpu=True))


def _activations(config: Config, model: SizedModel, grid: Grid, element_bytes: int, *, is_on_gpu: bool) -> ActivationNeed:
    at_peaks = activation_need(
        config.model,
        model.padded_vocab_size,
        RankShare(
            config.training.micro_batch_size,
            element_bytes,
            grid.tensor_ranks,
            sequence_parallel=config.distributed.sequence_parallel,
            context_ranks=grid.context_ranks,
        ),
        attention=_attention_need(config, element_bytes, is_on_gpu=is_on_gpu),
        is_on_gpu=is_on_gpu,
    )
    if not config.data.reset_attention_mask:
        return at_peaks
    # Some devices have a kernel that needs no mask, but a plan cannot ask the device.
    mask = mask_bytes(config.training.micro_batch_size, config.model.seq_length, element_bytes)
    return ActivationNeed(*(nbytes + mask for nbytes in at_peaks))


def _kept_inputs(config: Config, grid: Grid, element_bytes: int, *, is_on_gpu: bool) -> KeptNeed:
    return kept_need(config.model, kept_shape(config, grid), element_bytes, has_host=is_on_gpu)


def _host_is_too_small(config: Config, need: MemoryNeed, ranks: str, host_bytes: int) -> str:
    takers = ["--optimizer-cpu-offload"] if config.zero.optimizer_cpu_offload else []
    takers += ["--checkpoint-in-cpu"] if need.kept_inputs.host else []
    takers += ["--async-save"] if need.save_copy else []
    if takers == ["--async-save"]:
        return (
            f"--async-save needs {in_gib(need.save_copy)} of pinned host memory on {ranks}, for a copy of the state that is saved, but "
            f"only {in_gib(host_bytes)} is available; leave --async-save out, or take more nodes."
        )
    # More nodes do not lessen the inputs that a rank keeps.
    remedy = "take more nodes" if takers != ["--checkpoint-in-cpu"] else "raise --recompute-num-layers"
    return (
        f"{', '.join(takers)}: {ranks} needs {in_gib(need.host)} of host memory ({need.on_host()}) and has {in_gib(host_bytes)}; "
        f"{remedy}, or leave {any_of(takers)} out."
    )


def memory_need(config: Config, model: SizedModel, sharding: Sharding, grid: Grid, *, is_on_gpu: bool) -> MemoryNeed:
    """The memory that each rank needs in this world."""
    starts_exact = config.zero.zero_full_precision_iters > 0
    plan = largest_plan(model.unit_specs(), model.uses(), sharding, grid.ladder, starts_exact=starts_exact, on_streams=is_on_gpu)
    device = device_memory(grid) if is_on_gpu else NO_DEVICE
    return MemoryNeed(
        plan,
        _activations(config, model, grid, sharding.element_bytes, is_on_gpu=is_on_gpu),
        save_copy_bytes(config, model, sharding, grid),
        is_on_gpu,
        device,
        _kept_inputs(config, grid, sharding.element_bytes, is_on_gpu=is_on_gpu),
        sharing=sharing_buffer_bytes(shared_on_rank(model.unit_specs(), sharding, grid), grid.tensor_ranks),
    )


def shared_on_rank(unit_specs: Sequence[UnitSpec], sharding: Sharding, grid: Grid) -> int:
    """The most elements of one rank's optimizer state that other tensor ranks have, too."""
    if grid.tensor_ranks == 1:
        return 0
    layouts = [FlatLayout(spec.params, grid.data_ranks, sharding.block_numel) for spec in unit_specs]
    return most_shared_numel(layouts, sharding.policy.in_world(grid.ladder).optimizer.slices(grid.ladder))


def save_copy_bytes(config: Config, model: SizedModel, sharding: Sharding, grid: Grid) -> int:
    """Bytes that --async-save copies on one rank at most: what `saved_bytes` counts, of its primary slices."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or not checkpoint.async_save:
        return 0
    layouts = (FlatLayout(spec.params, grid.data_ranks, sharding.block_numel) for spec in model.unit_specs())
    return saved_bytes(checkpoint, sharding, grid) * sum(layout.slice_numel for layout in layouts)


def saved_bytes(checkpoint: CheckpointConfig, sharding: Sharding, grid: Grid) -> int:
    """Bytes of one parameter in a checkpoint: its main weight, and unless --no-save-optim Adam's moments and a kept copy."""
    if checkpoint.no_save_optim:
        return MAIN_BYTES
    copy = sharding.element_bytes if sharding.policy.in_world(grid.ladder).keeps_copy else 0
    return MAIN_BYTES * (1 + ADAM_MOMENTS) + copy


def _attention_need(config: Config, element_bytes: int, *, is_on_gpu: bool) -> AttentionNeed:
    """The memory that the attention kernel needs, if it runs on such a device (model/attention_kernel.py)."""
    backend, drops = config.model.attention_backend, config.model.attention_dropout > 0
    flash_serves = element_bytes == 2 and backend != "fused" and not config.data.reset_attention_mask
    return AttentionNeed(
        keeps_scores=backend in ("unfused", "local") or (drops and not is_on_gpu),
        repeats_heads=is_on_gpu and not flash_serves,
        is_deterministic=config.training.deterministic_mode,
    )


def smallest_nodes(fits: Callable[[int], bool], nodes_too_few: int) -> int | None:
    """Smallest number of nodes above `nodes_too_few` that fits; None if even LARGEST_NODES do not fit."""
    too_few, enough = nodes_too_few, 2 * nodes_too_few
    while not fits(enough):
        too_few, enough = enough, 2 * enough
        if too_few >= LARGEST_NODES:
            return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough


def in_gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.1f} MiB"


def _lever_without_copy(zero: ZeroConfig) -> list[str]:
    """What to choose for a smaller secondary copy or none; empty if the run has none."""
    if zero.zero_hpz_partition_size == 1:
        return []
    if zero.zeropp is not None:  # both keep a copy: paper in 8 bits, lean in 16
        return ["--zeropp paper"] if zero.zero_quantized_weight_differences else ["--zero-stage 3 without --zeropp"]
    return ["no --zero-quantized-weight-differences"] if zero.zero_quantized_weight_differences else ["--zero-hpz-partition-size 1"]


def _larger_tensor_size(config: Config, model: SizedModel, grid: Grid) -> list[str]:
    """The next number of ranks that could share the layers of this run; empty if there is none."""
    larger = (size for size in divisors(grid.ranks_per_node) if size > grid.tensor_ranks and model.padded_vocab_size % size == 0)
    fitting = (size for size in larger if could_have(config, grid.world_size, tensor_model_parallel_size=size))
    return [f"{TENSOR_SIZE} {size}" for size in fitting][:1]


def _larger_context_size(config: Config, grid: Grid) -> list[str]:
    """The next number of ranks that could divide the samples of this run; empty if there is none."""
    larger = (size for size in divisors(grid.data_ranks) if size > grid.context_ranks)
    fitting = (size for size in larger if could_have(config, grid.world_size, context_parallel_size=size))
    return [f"{CONTEXT_SIZE} {size}" for size in fitting][:1]


def _sequence_parallel(config: Config, tensor_ranks: int) -> list[str]:
    """Sequence parallelism, if the run could have it and has not; otherwise empty."""
    parts = tensor_ranks * config.distributed.context_parallel_size
    has_parts = tensor_ranks > 1 and config.model.seq_length % parts == 0
    return ["--sequence-parallel"] if has_parts and not config.distributed.sequence_parallel else []


def _can_offload(config: Config) -> bool:
    """Whether the run could have --optimizer-cpu-offload, and has not."""
    has_owners = config.zero.zero_stage > 0 and config.optimizer.optimizer_backend == "torch"
    return has_owners and not config.zero.optimizer_cpu_offload


def _remedy(config: Config, model: SizedModel, nodes: int | None, grid: Grid, need: MemoryNeed, first: Sequence[str]) -> str:
    """first: the flags to name before others, such as those of which each makes the run fit."""
    ranks_per_node = grid.ranks_per_node
    levers = [*first]
    levers += [] if config.model.recompute_granularity == "full" else ["--checkpoint-activations"]
    levers += ["--loss-chunk-tokens 1024"] if config.model.loss_chunk_tokens == 0 else []
    levers += ["no --async-save"] if need.save_copy_on_device else []
    levers += ["--zero-gradients-between-microbatches primary"] if config.zero.zero_gradients_between_microbatches == "secondary" else []
    levers += _sequence_parallel(config, grid.tensor_ranks)
    can_divide_weights = ranks_per_node > grid.tensor_ranks or not config.zero.zero_quantized_weight_differences
    levers += ["--zero-stage 3"] if config.zero.zero_stage != 3 and can_divide_weights else []
    if nodes is None:
        levers += _lever_without_copy(config.zero)
        levers += _larger_tensor_size(config, model, grid)
        levers += _larger_context_size(config, grid) if need.activations > need.total // 2 else []
        levers += [] if config.training.micro_batch_size == 1 else ["a smaller --micro-batch-size"]
        return f"no number of such nodes is enough; choose {any_of([*levers, 'a smaller model'])}"
    others = f", or give {any_of(levers)}" if levers else ""
    return (
        f"the smallest world that fits is {counted(nodes, 'node')} of {counted(ranks_per_node, 'rank')} with this much memory each{others}"
    )
