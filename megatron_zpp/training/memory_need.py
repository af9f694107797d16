"""Computes the memory that each rank needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_zpp.config.schema import CheckpointConfig, Config
from megatron_zpp.model.activations import ActivationNeed, activation_need, mask_bytes
from megatron_zpp.model.block_memory import AttentionNeed, RankShare
from megatron_zpp.model.kept_need import KeptNeed, kept_need
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.training.sharding import kept_shape
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.plan.device_memory import NO_DEVICE, DeviceMemory, device_memory
from megatron_zpp.zero.plan.memory_plan import ADAM_MOMENTS, MAIN_BYTES, MemoryPlan, Sharding, largest_plan
from megatron_zpp.zero.shared_places import most_shared_numel, sharing_buffer_bytes


class SizedModel(Protocol):
    """The part of a model that plans use: of model.gpt.GPT, or of model.shapes.ModelShape, which needs no torch."""

    @property
    def padded_vocab_size(self) -> int: ...

    def unit_specs(self) -> tuple[UnitSpec, ...]: ...

    def uses(self) -> tuple[Use, ...]: ...


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
    save_copy: int
    is_on_gpu: bool
    device: DeviceMemory
    kept_inputs: KeptNeed
    sharing: int

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
            "copy of weights": self.plan.secondary,
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


def memory_need(config: Config, model: SizedModel, sharding: Sharding, grid: Grid, *, is_on_gpu: bool) -> MemoryNeed:
    """The memory that each rank needs in this world."""
    starts_exact = config.zero.zero_full_precision_iters > 0
    plan = largest_plan(model.unit_specs(), model.uses(), sharding, grid.ladder, starts_exact=starts_exact, on_streams=is_on_gpu)
    device = device_memory(grid) if is_on_gpu else NO_DEVICE
    return MemoryNeed(
        plan,
        _activations(config, model, grid, sharding.element_bytes, is_on_gpu=is_on_gpu),
        _save_copy_bytes(config, model, sharding, grid),
        is_on_gpu,
        device,
        _kept_inputs(config, grid, sharding.element_bytes, is_on_gpu=is_on_gpu),
        sharing=sharing_buffer_bytes(shared_on_rank(model.unit_specs(), sharding, grid), grid.tensor_ranks),
    )


def with_flags(need: MemoryNeed, config: Config, model: SizedModel, grid: Grid, element_bytes: int) -> MemoryNeed:
    """`need` with the activations and the kept inputs that the flags of `config` give; its states and buffers stay."""
    return replace(
        need,
        at_peaks=_activations(config, model, grid, element_bytes, is_on_gpu=need.is_on_gpu),
        kept_inputs=_kept_inputs(config, grid, element_bytes, is_on_gpu=need.is_on_gpu),
    )


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
        attention=attention_need(config, element_bytes, is_on_gpu=is_on_gpu),
        is_on_gpu=is_on_gpu,
    )
    if not config.data.reset_attention_mask:
        return at_peaks
    # Some devices have a kernel that needs no mask, but a plan cannot ask the device.
    mask = mask_bytes(config.training.micro_batch_size, config.model.seq_length, element_bytes)
    return ActivationNeed(*(nbytes + mask for nbytes in at_peaks))


def _kept_inputs(config: Config, grid: Grid, element_bytes: int, *, is_on_gpu: bool) -> KeptNeed:
    return kept_need(config.model, kept_shape(config, grid), element_bytes, has_host=is_on_gpu)


def shared_on_rank(unit_specs: Sequence[UnitSpec], sharding: Sharding, grid: Grid) -> int:
    """The most elements of one rank's optimizer state that other tensor ranks have, too."""
    if grid.tensor_ranks == 1:
        return 0
    layouts = [FlatLayout(spec.params, grid.data_ranks, sharding.block_numel) for spec in unit_specs]
    return most_shared_numel(layouts, sharding.policy.in_world(grid.ladder).optimizer.slices(grid.ladder))


def _save_copy_bytes(config: Config, model: SizedModel, sharding: Sharding, grid: Grid) -> int:
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


def attention_need(config: Config, element_bytes: int, *, is_on_gpu: bool) -> AttentionNeed:
    """The memory that the attention kernel needs, if it runs on such a device (model/attention_kernel.py)."""
    backend, drops = config.model.attention_backend, config.model.attention_dropout > 0
    flash_serves = element_bytes == 2 and backend != "fused" and not config.data.reset_attention_mask
    return AttentionNeed(
        keeps_scores=backend in ("unfused", "local") or (drops and not is_on_gpu),
        repeats_heads=is_on_gpu and not flash_serves,
        is_deterministic=config.training.deterministic_mode,
    )


def in_gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.1f} MiB"
