"""One unit on one rank: its main weights, and the rungs on which its working weights stand fresh.

Storage of a released rung is really freed: `full` is resized to nothing and back, in place, so that tensors saved by autograd stay valid.
At rest a parameter shows one NaN expanded to its shape, because reading freed storage would end the process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_zpp.comm.codecs import Regions, Runs
from megatron_zpp.comm.lanes import Hop
from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.links import Climb, Ladder, LinkCodecs
from megatron_zpp.parallel.specs import UnitSpec
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.policy import Policy, Rung


class WeightUnit:
    """Weights of one unit. A rung carries the version of the main weights it was made from and is fresh while they are the same.

    main_weight: [slices * slice_numel] fp32 on the optimizer's rung: the own slice, or all slices.
    parameters: the leaves of the model, in the order of the layout.
    """

    def __init__(self, spec: UnitSpec, layout: FlatLayout, policy: Policy, ladder: Ladder, codecs: LinkCodecs, like: Tensor) -> None:
        self.name = spec.name
        self.layout = layout
        self.runs = Runs(layout.blocks_run, layout.exact_run)
        self._policy = policy
        self._ladder = ladder
        self._codecs = codecs
        self._full = torch.empty(layout.numel, dtype=like.dtype, device=like.device)
        self._full_bytes = self._full.untyped_storage().nbytes()
        self._nan = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
        self.parameters = [nn.Parameter(torch.empty(0, dtype=like.dtype, device=like.device)) for _ in layout.params]
        self._views = [self._full[param.offset : param.offset + param.numel].view(param.spec.shape) for param in layout.params]
        self._version = 1
        self._full_version = 0
        self._full_hop: Hop | None = None
        self._secondary: Tensor | None = None  # [N, payload_bytes] uint8
        self._secondary_version = 0
        self._own_payload: Tensor | None = None  # [1, payload_bytes] uint8
        self._own_version = 0
        self._secondary_hop: Hop | None = None
        self._detach()
        self._release_full()
        self.first_slice, self.slices = (0, layout.slices) if policy.optimizer is Rung.FULL else (ladder.own_slice, 1)
        self.main_weight = torch.zeros(self.slices * layout.slice_numel, dtype=torch.float32, device=like.device)
        self._initialize()

    def _initialize(self) -> None:
        for segment in self.layout.segments(self.first_slice, self.slices):
            stop = segment.offset + segment.stop - segment.start
            self.main_weight[segment.offset : stop].copy_(segment.spec.initial_values(segment.start, segment.stop))

    # ---- up

    def climb_to_secondary(self) -> None:
        """Submits the climb over the inter link, unless a rung above the primary is fresh or on its way."""
        if self._policy.optimizer is Rung.FULL or self._is_under_way(Rung.SECONDARY) or self._is_under_way(Rung.FULL):
            return
        payload_bytes = self._codecs.intra.payload_bytes(self.runs)
        self._secondary = self._ladder.staging.take(self._ladder.nodes * payload_bytes).view(-1, payload_bytes)
        self._secondary_hop = self._ladder.climb_to_secondary(self._climb(), self._secondary)

    def climb_to_full(self) -> None:
        """Submits what is missing of the climb to the full rung."""
        if self._is_under_way(Rung.FULL):
            return
        self._allocate_full()
        full = Regions.of(self._full, self.runs)
        if self._policy.optimizer is Rung.FULL:
            full.copy_(Regions.of(self.main_weight, self.runs))
            self._full_version = self._version
            self._attach()
            return
        self.climb_to_secondary()
        if self._secondary is None:
            raise RuntimeError(f"unit {self.name}: no secondary rung to climb from")
        self._full_hop = self._ladder.climb_to_full(self._climb(), self._secondary, full, self._secondary_hop)

    def wait(self, category: Category) -> None:
        """Returns once the full rung is fresh, and books what the climb moved.

        category: of a climb that serves this use alone; one to a rung that stays for the step is the training's, whoever asks first.
        """
        if self._full_hop is None:
            if self._full_version != self._version:
                raise RuntimeError(f"unit {self.name}: its full rung is stale and no climb is on its way")
            return
        self._ladder.lanes.wait(self._full_hop)
        self._book(self._secondary_hop, Rung.SECONDARY, category)
        self._book(self._full_hop, Rung.FULL, category)
        if self._secondary_hop is not None:
            self._secondary_version = self._version
        self._full_version = self._version
        self._secondary_hop = self._full_hop = None
        self._attach()
        if self._policy.weights_in_step is not Rung.SECONDARY:
            self._release_secondary()

    # ---- down

    def rest(self, rung: Rung) -> None:
        """Lets go of everything above `rung`, unless a climb is under way: somebody needs it already."""
        if self._secondary_hop is not None or self._full_hop is not None:
            return
        if rung < Rung.FULL:
            self._detach()
            self._release_full()
        if rung < Rung.SECONDARY:
            self._release_secondary()

    def invalidate(self) -> None:
        """Makes every rung stale, because the main weights have changed; climbs under way are waited for and dropped."""
        for hop in (self._secondary_hop, self._full_hop):
            if hop is not None:
                self._ladder.lanes.wait(hop)
        self._secondary_hop = self._full_hop = None
        self._version += 1
        self._detach()
        self._release_secondary()
        self.rest(self._policy.weights_between_steps)

    def use_codecs(self, codecs: LinkCodecs) -> None:
        """Lets the next climbs cross the links in `codecs`; rungs made with others are stale."""
        self.invalidate()
        self._codecs = codecs
        self._own_payload = None

    # ---- what rests where

    def main_regions(self) -> Regions:
        """The main weights by region, on the optimizer's rung."""
        return Regions.of(self.main_weight, self.runs)

    def live_tensors(self) -> list[Tensor]:
        """The tensors whose storages hold this unit's weights now."""
        rungs = [self.main_weight, self._full, self._secondary, self._own_payload]
        return [tensor for tensor in rungs if tensor is not None]

    def _book(self, hop: Hop | None, rung: Rung, category: Category) -> None:
        if hop is not None:
            stays = rung <= self._policy.weights_in_step
            self._ladder.ledger.book(Category.WEIGHTS if stays else category, hop.traffic)

    def _is_under_way(self, rung: Rung) -> bool:
        if rung is Rung.FULL:
            return self._full_hop is not None or self._full_version == self._version
        return self._secondary_hop is not None or (self._secondary is not None and self._secondary_version == self._version)

    def _climb(self) -> Climb:
        return Climb(self.name, self.runs, self._codecs, self._encode_own)

    def _encode_own(self, payload: Tensor) -> None:
        """Where encoding costs more than a copy and the unit climbs from here repeatedly, it is done once and the rung rests encoded."""
        codec = self._codecs.inter
        if not codec.rests_encoded or self._policy.weights_in_step is not Rung.PRIMARY:
            codec.encode_into(self.main_regions(), payload)
            return
        if self._own_payload is None:
            self._own_payload = torch.empty_like(payload)
        if self._own_version != self._version:
            codec.encode_into(self.main_regions(), self._own_payload)
            self._own_version = self._version
        payload.copy_(self._own_payload)

    def _attach(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def _detach(self) -> None:
        for parameter, param in zip(self.parameters, self.layout.params, strict=True):
            parameter.data = self._nan.expand(param.spec.shape)

    def _allocate_full(self) -> None:
        if self._full.untyped_storage().nbytes() == 0:
            self._full.untyped_storage().resize_(self._full_bytes)

    def _release_full(self) -> None:
        self._full_version = 0
        self._full.untyped_storage().resize_(0)

    def _release_secondary(self) -> None:
        if self._secondary is not None:
            self._ladder.staging.give(self._secondary.view(-1))
        self._secondary = None
