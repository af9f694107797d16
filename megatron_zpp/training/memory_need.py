"""The memory that each rank needs: the tensors of a planned step, and what is beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_zpp.config.counted import in_gib
from megatron_zpp.config.schema import Config
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.plan.device_memory import NO_DEVICE, DeviceMemory, device_memory
from megatron_zpp.training.plan.kinds import ACTIVATIONS, GATHERED, KEPT_INPUTS, ON_DEVICE, ON_HOST, OTHER, STATES
from megatron_zpp.training.plan.outer_plan import outer_shapes
from megatron_zpp.training.plan.planned_step import PlannedMemory, PlannedStep, plan_step
from megatron_zpp.training.sharding import column_grid, inner_saved_bytes, layouts_of, outer_saved_bytes, saved_bytes


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one rank needs.

    tensors: the most that there are at once. save_copy: of --async-save's copy of the state, in memory of the host. With is_on_gpu that is
    not part of `total`. device: of a GPU, beside tensors.
    """

    tensors: PlannedMemory
    save_copy: int
    is_on_gpu: bool
    device: DeviceMemory

    @property
    def total(self) -> int:
        """Peak bytes on the device."""
        return self.tensors.total + self.device.total + self.save_copy_on_device

    @property
    def host(self) -> int:
        """Bytes in the memory of a GPU's host; without a GPU they are part of `total`."""
        return sum(self.tensors.on_host.values()) + self.save_copy if self.is_on_gpu else 0

    @property
    def states(self) -> int:
        """Bytes of `total` for weights, gradients, optimizer state and copies of weights."""
        return self.of(*STATES)

    @property
    def in_step(self) -> int:
        """Bytes of `total` for gathered units, activations and what else exists for a moment, without payload buffers."""
        return self.of(GATHERED, ACTIVATIONS, OTHER)

    @property
    def whatever_the_world(self) -> int:
        """Bytes of `total` that more ranks do not lessen."""
        return self.of(ACTIVATIONS, KEPT_INPUTS)

    def of(self, *kinds: str) -> int:
        """Bytes of the device for these kinds of tensors (training/plan/kinds.py)."""
        return sum(self.tensors.on_device.get(kind, 0) for kind in kinds)

    def beside(self, taken: DeviceMemory) -> MemoryNeed:
        """The need that is left if `taken` has been taken at the start of a run. The rest comes from torch's allocator."""
        return replace(self, device=self.device.beside(taken))

    def on_host(self) -> str:
        """The parts of `host` in words."""
        return _in_words({**_ordered(self.tensors.on_host, ON_HOST), "copy for --async-save": self.save_copy})

    @property
    def save_copy_on_device(self) -> int:
        """Bytes of `total` for the copy of --async-save."""
        return 0 if self.is_on_gpu else self.save_copy

    def __str__(self) -> str:
        parts = {
            **_ordered(self.tensors.on_device, ON_DEVICE),
            "CUDA context and workspaces": self.device.context + self.device.workspaces,
            "NCCL buffers": self.device.communicators,
            "copy for --async-save": self.save_copy_on_device,
        }
        return f"{_in_words(parts)}; the most in {self.tensors.moment}"


def _ordered(nbytes: Mapping[str, int], kinds: Iterable[str]) -> dict[str, int]:
    return {kind: nbytes.get(kind, 0) for kind in kinds}


def _in_words(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {in_gib(nbytes)}" for name, nbytes in parts.items() if in_gib(nbytes) != in_gib(0))


def memory_need(config: Config, padded_vocab_size: int, grid: Grid, *, is_on_gpu: bool) -> MemoryNeed:
    """The memory that each rank needs. grid: of the world, or of one island."""
    return need_of(plan_step(config, grid, padded_vocab_size, is_on_gpu=is_on_gpu), config, padded_vocab_size, grid, is_on_gpu=is_on_gpu)


def need_of(step: PlannedStep, config: Config, padded_vocab_size: int, grid: Grid, *, is_on_gpu: bool) -> MemoryNeed:
    """The memory that each rank needs for such steps."""
    device = device_memory(grid, column_grid(config)) if is_on_gpu else NO_DEVICE
    return MemoryNeed(step.memory, _save_copy_bytes(config, padded_vocab_size, grid), is_on_gpu, device)


def _save_copy_bytes(config: Config, padded_vocab_size: int, grid: Grid) -> int:
    """Bytes that --async-save copies on one rank at most: what `saved_bytes` counts, of its primary slices."""
    if config.checkpoint.save is None or not config.checkpoint.async_save:
        return 0
    layouts = layouts_of(config, padded_vocab_size, grid)
    primary_numel = sum(layout.slice_numel for layout in layouts)
    if not config.diloco.has_islands:
        return saved_bytes(config, grid) * primary_numel
    shapes = outer_shapes(layouts, config.diloco.diloco_islands)
    outer_numel = sum(max(shape.numel for shape in of_unit if shape is not None) for of_unit in shapes)
    return inner_saved_bytes(config) * primary_numel + outer_saved_bytes(config) * outer_numel
