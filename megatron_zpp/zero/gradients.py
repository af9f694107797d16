"""The gradient of one unit: fp32 sums over micro-batches, on the rung where the policy lets them rest."""

from __future__ import annotations

import torch

from megatron_zpp.comm.codecs import Regions
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.policy import Policy, Rung


class UnitGradient:
    """The sums of one unit on one rank.

    total: [slices * slice_numel] fp32, the slices of the resting rung that stand on this rank; `resting` shows it by region.
    primary: the own slice of it. for_optimizer: what an optimizer step reads, `primary` or all of `resting`.
    """

    def __init__(self, name: str, layout: FlatLayout, policy: Policy, topology: Topology, rank: int, device: torch.device) -> None:
        self.name = name
        self.layout = layout
        own_slice = topology.slice_of(rank)
        own = {Rung.PRIMARY: 0, Rung.SECONDARY: topology.partition_of(rank), Rung.FULL: own_slice}[policy.gradients]
        self.total = torch.zeros(policy.gradients.slices(topology) * layout.slice_numel, dtype=torch.float32, device=device)
        self.resting = Regions.of(self.total, layout.runs)
        self.primary = self.resting.slice_at(own)
        self.for_optimizer = self.resting if policy.optimizer is Rung.FULL else self.primary
        self._smeared_paddings = tuple(layout.paddings(own_slice, 1)) if policy.gradient_codes.any_mixes_neighbours else ()

    def clear_padding(self) -> None:
        """Sets the own slice's padding to zero, where rotation has written errors of neighbouring values."""
        for padding in self._smeared_paddings:
            self.primary.range(padding.start, padding.stop).zero_()

    def clear(self) -> None:
        """Sets the sums to zero for the next step."""
        self.total.zero_()
