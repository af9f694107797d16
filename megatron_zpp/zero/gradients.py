"""Gradients of one unit: collected from autograd, descended by micro-batch, summed in fp32 on the rung where they rest.

                      full                 secondary               primary
    rest FULL         += per micro-batch   -                       last micro-batch
    rest SECONDARY    descends each        += per micro-batch      last micro-batch
    rest PRIMARY      descends each        (passes through)        += per micro-batch

An optimizer on the full rung then lets the fp32 mean climb back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_zpp.comm.codecs import CastCodec, Regions, Runs
from megatron_zpp.comm.lanes import Hop
from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.links import Climb, Ladder, LinkCodecs
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.policy import Policy, Rung


class UnitGradient:
    """The gradient of one unit on one rank.

    total: fp32 sums on the resting rung; `primary` and `for_optimizer` are views of it.
    """

    def __init__(self, name: str, layout: FlatLayout, policy: Policy, ladder: Ladder, codecs: LinkCodecs, like: Tensor) -> None:
        self.name = name
        self.layout = layout
        self._runs = Runs(layout.blocks_run, layout.exact_run)
        self._policy = policy
        self._ladder = ladder
        self.codecs = codecs
        self._like = like
        slices = {Rung.PRIMARY: 1, Rung.SECONDARY: ladder.nodes, Rung.FULL: layout.slices}[policy.gradients]
        own = {Rung.PRIMARY: 0, Rung.SECONDARY: ladder.own_slice % ladder.nodes, Rung.FULL: ladder.own_slice}[policy.gradients]
        self.total = torch.zeros(slices * layout.slice_numel, dtype=torch.float32, device=like.device)
        self._resting = Regions.of(self.total, self._runs)
        self.primary = self._resting.slice_at(own)
        self.for_optimizer = self._resting if policy.optimizer is Rung.FULL else self.primary
        self._arrived: set[int] = set()
        self._smeared_paddings = tuple(layout.paddings(ladder.own_slice, 1)) if policy.gradient_options.is_rotated else ()
        self._iteration = 0
        self._microbatch = 0
        self._collected: Tensor | None = None  # [numel] like the weights, one micro-batch
        self._hops: list[Hop] = []

    # ---- collecting one micro-batch

    def collect(self, index: int, gradient: Tensor) -> bool:
        """Takes the gradient of parameter `index` of the layout; True once every parameter's has come."""
        target = self._place_of(index)
        if self._policy.gradients is Rung.FULL:
            target.add_(gradient.view(-1))
        else:
            target.copy_(gradient.view(-1))
        self._arrived.add(index)
        return len(self._arrived) == len(self.layout.params)

    def fill_missing(self) -> None:
        """Zeros for parameters that the loss did not reach."""
        for index in range(len(self.layout.params)):
            if index not in self._arrived and self._policy.gradients is not Rung.FULL:
                self._place_of(index).zero_()

    def _place_of(self, index: int) -> Tensor:
        param = self.layout.params[index]
        return self._flat()[param.offset : param.offset + param.numel]

    def _flat(self) -> Tensor:
        if self._hops:
            self.finish()  # the micro-batch before is still descending from this buffer
        if self._policy.gradients is Rung.FULL:
            return self.total
        if self._collected is None:
            nbytes = self.layout.numel * self._like.dtype.itemsize
            self._collected = self._ladder.staging.take(nbytes).view(self._like.dtype)
            for padding in self.layout.paddings():
                self._collected[padding.start : padding.stop].zero_()
        return self._collected

    # ---- descending

    def descend(self, *, is_last_microbatch: bool) -> None:
        """Submits the hops that this micro-batch owes; every rank must call it for the same units in the same order."""
        self._arrived.clear()
        codecs = self.codecs.drawn_for(self.name, self._ladder.backend.rank, self._iteration, self._microbatch)
        self._microbatch += 1
        if self._policy.gradients is Rung.FULL:
            if is_last_microbatch:
                self._hops += self._ladder.descend(self.name, codecs, self._resting, self.primary, accumulate=False)
                self._climb_back()
            return
        values = Regions.of(self._flat(), self._runs)
        if self._policy.gradients is Rung.PRIMARY:
            self._hops += self._ladder.descend(self.name, codecs, values, self.primary, accumulate=True)
            return
        hop = self._ladder.descend_to_secondary(self.name, codecs.intra, values, self._resting, accumulate=True)
        self._hops.append(hop)
        if is_last_microbatch:
            self._hops.append(
                self._ladder.descend_from_secondary(self.name, codecs.inter, self._resting, self.primary, accumulate=False, after=hop)
            )

    def _climb_back(self) -> None:
        if self._policy.optimizer is not Rung.FULL:
            return
        codec = CastCodec(torch.float32)
        climb = Climb(self.name, self._runs, LinkCodecs(codec, codec), lambda payload: codec.encode_into(self.primary, payload))
        payload_bytes = codec.payload_bytes(self._runs)
        payloads = self._ladder.staging.take(self._ladder.nodes * payload_bytes).view(-1, payload_bytes)
        secondary = self._ladder.climb_to_secondary(climb, payloads, self._hops[-1])
        self._hops += [secondary, self._ladder.climb_to_full(climb, payloads, self._resting, secondary)]
        self._collected = payloads.view(-1)

    def finish(self) -> None:
        """Returns once every hop under way has landed, and books what they moved."""
        for hop in self._hops:
            self._ladder.lanes.wait(hop)
            self._ladder.ledger.book(Category.GRADIENTS, hop.traffic)
        self._hops = []
        if self._collected is not None:
            self._ladder.staging.give(self._collected.view(torch.uint8))
        self._collected = None

    def clear_padding(self) -> None:
        """Sets the own slice's padding to zero, where the means of rotated codes leave a part of their neighbours."""
        for padding in self._smeared_paddings:
            self.primary.range(padding.start, padding.stop).zero_()

    def start_iteration(self, iteration: int) -> None:
        """Says which step the next micro-batches belong to, and that none of it has descended."""
        self._iteration = iteration
        self._microbatch = 0

    def clear(self) -> None:
        """Sets the sums to zero for the next step."""
        self.total.zero_()
