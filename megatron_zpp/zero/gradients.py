"""The gradient of one unit on one rank: taken from autograd, summed over micro-batches, brought down to the rank's own slice.

    sums kept on    full rung                  secondary rung           primary rung
    FULL            adds every micro-batch     -                        gets the mean after the last one
    SECONDARY       sends every micro-batch    adds every micro-batch   gets the mean after the last one
    PRIMARY         sends every micro-batch    passes it on             adds every micro-batch

The first micro-batch of a step is not added: it replaces the sums of the step before. If the optimizer is kept on the full rung, the fp32
mean then climbs back to every rank. In a world of one rank nothing descends: the sums of every rung are those of the whole unit, and are
the mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_zpp.comm.code import LinkCodes
from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.codecs import LinkCodecs
from megatron_zpp.comm.lanes import Hop
from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.links import Climb, Links
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.policy import Policy, Rung

MOST_UNDER_WAY = 2  # descents; each holds the gradient of a whole unit until it has landed


class UnitGradient:
    """fp32 sums over micro-batches on the rung where the policy keeps gradients, and the hops that bring them there.

    Every rank must call `descend` for the same units in the same order.
    total: [slices * slice_numel] fp32, this rank's slices of that rung. regions: these slices by region.
    primary: this rank's own slice of them. for_optimizer: the slices that this rank's optimizer reads, `primary` or all of `regions`.
    reached: indices of the parameters that this rank's loss has reached in this step.
    """

    def __init__(self, name: str, layout: FlatLayout, policy: Policy, links: Links, codecs: LinkCodecs, dtype: torch.dtype) -> None:
        self.name = name
        self.layout = layout
        self._policy = policy
        self._links = links
        self._codecs = codecs
        topology, own_slice = links.topology, links.own_slice
        # A secondary rung holds the slices of the N ranks of a column, in the order of their partitions.
        own = {Rung.PRIMARY: 0, Rung.SECONDARY: topology.partition_of(links.data_rank), Rung.FULL: own_slice}[policy.gradients]
        self.total = torch.zeros(policy.gradients.slices(topology) * layout.slice_numel, dtype=torch.float32, device=links.device)
        self.regions = Regions.of(self.total, layout.slice_shape)
        self.primary = self.regions.slice_at(own)
        self.for_optimizer = self.regions if policy.optimizer is Rung.FULL else self.primary
        self.reached: set[int] = set()
        has_sums = policy.gradients is Rung.FULL or topology.is_one_rank
        self._collector = _Collector(layout, self.total if has_sums else None, dtype, links)
        self._mean_codecs = LinkCodecs.of(LinkCodes(), torch.float32, layout.block_numel)
        self._paddings = tuple(layout.paddings(own_slice, 1))
        self._iteration = 0
        self._microbatch = 0
        self._hops: list[Hop] = []
        self._mean_payloads: Tensor | None = None  # [N * payload_bytes] uint8, the secondary rung of the mean while it climbs back

    def collect(self, index: int, gradient: Tensor) -> bool:
        """Takes the gradient of parameter `index` of the layout; returns True once every parameter has brought its gradient."""
        self.finish()  # the descent of the last micro-batch may still read the buffer that this one is written to
        self.reached.add(index)
        return self._collector.put(index, gradient)

    def fill_missing(self) -> None:
        """Writes zeros for parameters that the loss did not reach in this micro-batch."""
        self.finish()
        self._collector.fill_missing()

    def descend(self, *, is_last_microbatch: bool) -> None:
        """Submits the hops that are due after this micro-batch."""
        name, links = self.name, self._links
        values = self._collector.take()
        if links.topology.is_one_rank:
            return
        codecs = self._codecs.with_noise_for(name, links.data_rank, self._iteration, self._microbatch)
        codecs = codecs.with_signs_for(links.topology, links.data_rank, "descend", name, self._iteration, self._microbatch)
        is_first = self._microbatch == 0
        self._microbatch += 1
        if self._policy.gradients is Rung.FULL:
            if is_last_microbatch:
                self._hops += links.descend(name, codecs, values, self.primary, accumulate=False)
                self._climb_back()
            return
        if self._policy.gradients is Rung.PRIMARY:
            self._hops += links.descend(name, codecs, values, self.primary, accumulate=not is_first)
            return
        hop = links.descend_to_secondary(name, codecs.intra, values, self.regions, accumulate=not is_first)
        self._hops.append(hop)
        if is_last_microbatch:
            self._hops.append(links.descend_from_secondary(name, codecs.inter, self.regions, self.primary, accumulate=False, after=hop))

    def finish(self) -> None:
        """Waits for every hop under way, and books its bytes."""
        if not self._hops:
            return  # and keep what has been collected since the last descent
        for hop in self._hops:
            self._links.lanes.wait(hop)
            self._links.ledger.book(Category.GRADIENTS, hop.traffic)
        self._hops = []
        self._collector.release()
        if self._mean_payloads is not None:
            self._links.staging.give(self._mean_payloads)
        self._mean_payloads = None

    def clear_padding(self) -> None:
        """Sets the padding of the own slice to zero, if the codecs write errors of neighbouring values there."""
        if self._codecs.any_mixes_neighbours:
            for padding in self._paddings:
                self.primary.range(padding.start, padding.stop).zero_()

    def start_iteration(self, iteration: int) -> None:
        """Begins a step: none of its micro-batches has descended yet."""
        self._iteration = iteration
        self._microbatch = 0
        self.reached.clear()
        self._collector.start_step()

    def use_codecs(self, codecs: LinkCodecs) -> None:
        """Uses `codecs` from the next descent on."""
        self._codecs = codecs

    def _climb_back(self) -> None:
        if self._policy.optimizer is not Rung.FULL:
            return
        links, codecs, slice_shape = self._links, self._mean_codecs, self.layout.slice_shape
        climb = Climb(self.name, slice_shape, codecs, lambda payload: codecs.inter.encode_into(self.primary, payload))
        payload_bytes = codecs.inter.payload_bytes(slice_shape)
        self._mean_payloads = links.staging.take(links.partitions * payload_bytes)
        payloads = self._mean_payloads.view(-1, payload_bytes)
        secondary = links.climb_to_secondary(climb, payloads, self._hops[-1])
        self._hops += [secondary, links.climb_to_full(self.name, codecs.intra, payloads, self.regions, secondary)]


class _Collector:
    """Collects one micro-batch's gradients of a unit, parameter by parameter, until the unit is complete.

    If this rank has the sums of the whole unit, each gradient is copied or added to them at once. Otherwise gradients wait in a buffer of
    the working dtype until they descend. Gradients of one dimension are copied or added together at the end: they are small, and many calls
    cost more.
    """

    def __init__(self, layout: FlatLayout, sums: Tensor | None, dtype: torch.dtype, links: Links) -> None:
        """sums: of the whole unit, [numel] fp32; None if this rank has only those of some slices."""
        self._layout = layout
        self._sums = sums
        self._adds = False  # whether gradients are added to what is there: to the sums of earlier micro-batches of the step
        self._dtype = dtype
        self._staging = links.staging
        self._paddings = tuple(layout.paddings(0, layout.slices))
        self._is_small = tuple(len(param.spec.shape) <= 1 for param in layout.params)
        self._arrived: set[int] = set()
        self._small: dict[int, Tensor] = {}  # gradients of one dimension that have arrived, by parameter
        self._buffer: Tensor | None = None  # [numel] of the working dtype, from the first gradient on until the descent has landed

    def put(self, index: int, gradient: Tensor) -> bool:
        """Takes the gradient of parameter `index` of the layout; returns True once every parameter has brought its gradient."""
        if self._is_small[index]:
            self._small[index] = gradient
        else:
            self._write([self._place_of(index)], [gradient.view(-1)])
        self._arrived.add(index)
        return len(self._arrived) == len(self._layout.params)

    def fill_missing(self) -> None:
        """Writes zeros for gradients that have not come. Sums of earlier micro-batches need none: a missing gradient adds nothing."""
        missing = [index for index in range(len(self._layout.params)) if index not in self._arrived]
        if missing and not self._adds:
            torch._foreach_zero_([self._place_of(index) for index in missing])

    def take(self) -> Regions:
        """The values of the whole unit, ready to descend. What is collected next belongs to the next micro-batch."""
        if self._small:
            self._write([self._place_of(index) for index in self._small], list(self._small.values()))
        if self._sums is not None and not self._adds:
            self._clear_paddings(self._sums)  # after a skipped step they are NaN
        self._small.clear()
        self._arrived.clear()
        self._adds = self._sums is not None
        return Regions.of(self._flat(), self._layout.slice_shape)

    def start_step(self) -> None:
        """Begins a step: the next micro-batch is its first."""
        self._adds = False

    def release(self) -> None:
        """Gives the buffer back. The descent that reads it must have ended."""
        if self._buffer is not None:
            self._staging.give(self._buffer.view(torch.uint8))
        self._buffer = None

    def _write(self, places: list[Tensor], gradients: list[Tensor]) -> None:
        """Copies or adds every gradient to its place, all in one call; a copy is one kernel on a GPU."""
        if self._adds:
            torch._foreach_add_(places, gradients)
        else:
            torch._foreach_copy_(places, gradients)

    def _place_of(self, index: int) -> Tensor:
        param = self._layout.params[index]
        return self._flat()[param.offset : param.offset + param.numel]

    def _flat(self) -> Tensor:
        """Where gradients of the whole unit are put, [numel]."""
        if self._sums is not None:
            return self._sums
        if self._buffer is None:
            self._buffer = self._staging.take(self._layout.numel * self._dtype.itemsize).view(self._dtype)
            self._clear_paddings(self._buffer)
        return self._buffer

    def _clear_paddings(self, flat: Tensor) -> None:
        if self._paddings:
            torch._foreach_zero_([flat[padding.start : padding.stop] for padding in self._paddings])


class Descents:
    """Decides when each unit's gradient descends: once it is complete, in one order on every rank, a few at a time.

    order: the names of all units in the order in which they descend. A unit that is complete before its turn waits
    for those before it, so that every rank sends the same messages in the same order.
    """

    def __init__(self, order: Sequence[str], gradients: Mapping[str, UnitGradient]) -> None:
        self._order = order
        self._gradients = gradients
        self._complete: set[str] = set()
        self._submitted = 0
        self._under_way: deque[UnitGradient] = deque()

    def complete(self, name: str, *, is_last_microbatch: bool) -> None:
        """Notes that the unit's gradient is complete, and submits every descent that may start now."""
        self._complete.add(name)
        while self._submitted < len(self._order) and self._order[self._submitted] in self._complete:
            gradient = self._gradients[self._order[self._submitted]]
            gradient.descend(is_last_microbatch=is_last_microbatch)
            self._submitted += 1
            self._under_way.append(gradient)
            if len(self._under_way) > MOST_UNDER_WAY:
                self._under_way.popleft().finish()

    def has_completed(self, name: str) -> bool:
        """Whether the unit's gradient of this micro-batch is complete."""
        return name in self._complete

    def complete_over(self, is_over: Callable[[str], bool], *, is_last_microbatch: bool) -> None:
        """Completes the units whose turn it is, and for which no more gradients come, with zeros for parameters that got none.

        Other ranks may have gradients for these parameters. They have submitted the descent, and may wait for this rank.
        """
        for name in self._order[self._submitted :]:
            if name not in self._complete:
                if not is_over(name):
                    return
                self._gradients[name].fill_missing()
                self.complete(name, is_last_microbatch=is_last_microbatch)

    def sweep(self, *, is_last_microbatch: bool) -> None:
        """Ends a micro-batch: no more gradients come for any unit."""
        self.complete_over(lambda name: True, is_last_microbatch=is_last_microbatch)
        self._complete.clear()
        self._submitted = 0

    def finish(self) -> None:
        """Returns once every descent under way has landed."""
        while self._under_way:
            self._under_way.popleft().finish()
