"""What the modules of a rank read as their weights, and what they should read: the main weights of all ranks as the links leave them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.block_numbers import after_blocks
from harness.codes import LinkBits
from harness.patience import PATIENCE_SECONDS
from harness.small_engine import Rank
from harness.worlds import Barrier

See = Callable[[str, str, Tensor], None]  # phase, unit, values of its parameters one after the other


def watch(rank: Rank, see: See) -> None:
    """Calls `see` whenever a use is about to run forward (recomputation included) or, where it reads weights there, backward."""
    for use in rank.model.uses():
        look = partial(_look, rank, use.units, see)
        module = rank.model.get_submodule(use.module)
        module.register_forward_pre_hook(partial(_before_forward, look))
        if use.needs_weights_in_backward:
            module.register_forward_hook(partial(_after_forward, look))


def _before_forward(look: Callable[[str], None], *_: Any) -> None:
    look("forward")


def _after_forward(look: Callable[[str], None], module: object, args: object, output: Tensor) -> None:
    if torch.is_grad_enabled() and output.requires_grad:
        output.grad_fn.register_hook(lambda *_: look("backward"))  # type: ignore[union-attr]  # once the engine's own node has run


def _look(rank: Rank, names: tuple[str, ...], see: See, phase: str) -> None:
    for unit in rank.engine.units:
        if unit.name in names:
            see(phase, unit.name, torch.cat([parameter.detach().flatten() for parameter in unit.parameters]))


@dataclass
class WholeWorld:
    """All ranks of a virtual world, for a look at the main weights of the others.

    No rank can be a step ahead of one that is between two steps: the gradient norm needs all.
    """

    world_size: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    _barrier: Barrier = field(init=False)

    def __post_init__(self) -> None:
        self._barrier = Barrier(self.world_size, timeout=PATIENCE_SECONDS)

    def join(self, rank: Rank) -> None:
        """Returns once every rank has joined."""
        self.ranks[rank.backend.rank] = rank
        self._barrier.wait()

    def main_weights(self, name: str) -> tuple[Tensor, Tensor]:
        """fp32: the blocks region of a unit and its exact region, from the slices of all ranks."""
        slices: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * self.world_size
        for rank in self.ranks.values():
            unit = next(each for each in rank.engine.units if each.name == name)
            blocks = unit.layout.slice_shape.blocks
            slices[rank.engine.links.own_slice] = unit.main_weight[:blocks], unit.main_weight[blocks:]
        return torch.cat([own for own, _ in slices]), torch.cat([exact for _, exact in slices])

    def working_weights(self, name: str, bits: LinkBits) -> Tensor:
        """What every rank should read of a unit: its parameters one after the other, in the dtype of the job."""
        rank = self.ranks[0]
        dtype, block_numel = rank.job.dtype, rank.job.block_numel
        blocks, exact = self.main_weights(name)
        for link_bits in _bits_at_work(rank, bits):
            blocks = blocks.to(dtype).float() if link_bits == 16 else after_blocks(blocks, link_bits, block_numel)
        flat = torch.cat([blocks, exact]).to(dtype)
        unit = next(each for each in rank.engine.units if each.name == name)
        return torch.cat([flat[param.offset : param.offset + param.numel] for param in unit.layout.params])


def _bits_at_work(rank: Rank, bits: LinkBits) -> list[int]:
    """In the order of the climb; a link of one rank has no bytes, and the same codec on both links encodes once."""
    partitions, ranks = rank.backend.grid.ladder.partitions, rank.backend.grid.partition_ranks
    at_work = [link_bits for link_bits, members in ((bits.inter, partitions), (bits.intra, ranks)) if members > 1]
    return sorted(set(at_work), key=at_work.index)
