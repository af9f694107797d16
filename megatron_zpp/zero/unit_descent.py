"""Brings one unit's gradient from autograd down to the rung where its sums are kept, micro-batch by micro-batch.

    sums kept on    full rung                  secondary rung           primary rung
    FULL            adds every micro-batch     -                        gets the mean after the last one
    SECONDARY       sends every micro-batch    adds every micro-batch   gets the mean after the last one
    PRIMARY         sends every micro-batch    passes it on             adds every micro-batch

The first micro-batch of a step is not added: it replaces the sums of the step before. If the optimizer is kept on the full rung, the fp32
mean then climbs back to every rank. In a world of one rank nothing descends: the sums of every rung are those of the whole unit, and are
the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_zpp.comm.climb import Climb
from megatron_zpp.comm.code import LinkCodes
from megatron_zpp.comm.lanes import Hop
from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.link_codecs import LinkCodecs
from megatron_zpp.comm.links import Ladder
from megatron_zpp.zero.gradients import Collector, UnitGradient
from megatron_zpp.zero.policy import Policy, Rung


class UnitDescent:
    """The hops of one unit's gradient on one rank; every rank must call `descend` for the same units in the same order."""

    def __init__(self, gradient: UnitGradient, collector: Collector, policy: Policy, ladder: Ladder, codecs: LinkCodecs) -> None:
        self._gradient = gradient
        self._collector = collector
        self._policy = policy
        self._ladder = ladder
        self._codecs = codecs
        self._mean_codecs = LinkCodecs.of(LinkCodes(), torch.float32, gradient.layout.block_numel)
        self._paddings = tuple(gradient.layout.paddings(ladder.own_slice, 1))
        self._iteration = 0
        self._microbatch = 0
        self._hops: list[Hop] = []
        self._mean_payloads: Tensor | None = None  # [N * payload_bytes] uint8, the secondary rung of the mean while it climbs back

    def collect(self, index: int, gradient: Tensor) -> bool:
        """Takes the gradient of parameter `index` of the layout; returns True once every parameter has brought its gradient."""
        self.finish()  # the descent of the last micro-batch may still read the buffer that this one is written to
        return self._collector.collect(index, gradient)

    def fill_missing(self) -> None:
        """Writes zeros for parameters that the loss did not reach in this micro-batch."""
        self.finish()
        self._collector.fill_missing()

    def descend(self, *, is_last_microbatch: bool) -> None:
        """Submits the hops that are due after this micro-batch."""
        name, ladder, gradient = self._gradient.name, self._ladder, self._gradient
        values = self._collector.complete()
        if ladder.topology.is_one_rank:
            return
        codecs = self._codecs.drawn_for(name, ladder.data_rank, self._iteration, self._microbatch)
        codecs = codecs.signed_for(ladder.topology, ladder.data_rank, "descend", name, self._iteration, self._microbatch)
        is_first = self._microbatch == 0
        self._microbatch += 1
        if self._policy.gradients is Rung.FULL:
            if is_last_microbatch:
                self._hops += ladder.descend(name, codecs, values, gradient.primary, accumulate=False)
                self._climb_back()
            return
        if self._policy.gradients is Rung.PRIMARY:
            self._hops += ladder.descend(name, codecs, values, gradient.primary, accumulate=not is_first)
            return
        hop = ladder.descend_to_secondary(name, codecs.intra, values, gradient.resting, accumulate=not is_first)
        self._hops.append(hop)
        if is_last_microbatch:
            self._hops.append(
                ladder.descend_from_secondary(name, codecs.inter, gradient.resting, gradient.primary, accumulate=False, after=hop)
            )

    def finish(self) -> None:
        """Waits for every hop under way, and books its bytes."""
        if not self._hops:
            return  # and keep what has been collected since the last descent
        for hop in self._hops:
            self._ladder.lanes.wait(hop)
            self._ladder.ledger.book(Category.GRADIENTS, hop.traffic)
        self._hops = []
        self._collector.release()
        if self._mean_payloads is not None:
            self._ladder.staging.give(self._mean_payloads)
        self._mean_payloads = None

    def clear_padding(self) -> None:
        """Sets the padding of the own slice to zero, if the codecs write errors of neighbouring values there."""
        if self._codecs.any_mixes_neighbours:
            for padding in self._paddings:
                self._gradient.primary.range(padding.start, padding.stop).zero_()

    def start_iteration(self, iteration: int) -> None:
        """Begins a step: none of its micro-batches has descended yet."""
        self._iteration = iteration
        self._microbatch = 0
        self._collector.start_step()

    def use_codecs(self, codecs: LinkCodecs) -> None:
        """Uses `codecs` from the next descent on."""
        self._codecs = codecs

    def _climb_back(self) -> None:
        if self._policy.optimizer is not Rung.FULL:
            return
        ladder, gradient, codecs = self._ladder, self._gradient, self._mean_codecs
        runs = gradient.layout.runs
        climb = Climb(gradient.name, runs, codecs, lambda payload: codecs.inter.encode_into(gradient.primary, payload))
        payload_bytes = codecs.inter.payload_bytes(runs)
        self._mean_payloads = ladder.staging.take(ladder.partitions * payload_bytes)
        payloads = self._mean_payloads.view(-1, payload_bytes)
        secondary = ladder.climb_to_secondary(climb, payloads, self._hops[-1])
        self._hops += [secondary, ladder.climb_to_full(gradient.name, codecs.intra, payloads, gradient.resting, secondary)]
