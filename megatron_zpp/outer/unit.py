"""The outer weights of one unit on one rank, and their exchange with the ranks that have the same slice on other islands.

With N islands of G ranks, inner weights x and, for one unit and the slice of the rank in its island (1/G of the unit):

    outer copy c       working dtype, the whole slice, the same bits on every island
    outer weights w    fp32, 1/N of the slice; outer momentum b: as w

    1  every rank    d = c - x, the outer gradient, in N parts
    2  descend       its parts cross as `gradient_code` says; each rank has the mean of its own part over the islands
    3  every rank    b = momentum b + mean;  w = w - rate (mean + momentum b), on its own part
    4  climb         w - c crosses as `difference_code` says; every rank adds all N parts to c
    5  every rank    x = c, or with a step in between x = c + what x has moved in it

The column of N ranks is a ladder of N partitions of one rank, so both hops are those that gradients and kept copies of weights have
(comm/links.py, zero/kept_copy.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.codecs import LinkCodecs
from megatron_zpp.comm.lanes import Hop
from megatron_zpp.comm.ledger import Traffic
from megatron_zpp.comm.links import Links
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.specs import ParamSpec
from megatron_zpp.zero.kept_copy import KeptCopy
from megatron_zpp.zero.layout import FlatLayout, Range
from megatron_zpp.zero.unit import WeightUnit


class OuterCodecs(NamedTuple):
    """Those of outer gradients, and those of changes of outer weights."""

    gradients: LinkCodecs
    differences: LinkCodecs


class OuterUnit:
    """One unit. links: to the ranks of the column; every one of them makes the same calls.

    inner: the unit in the engine of this island, whose main weights are x, on the device or its host.
    weight, momentum: [1 part] fp32, w and b. kept: holds c.
    """

    def __init__(self, inner: WeightUnit, layout: FlatLayout, links: Links, options: OuterOptions, dtype: torch.dtype) -> None:
        """layout: `outer_layout` of the unit. dtype: of c."""
        self.inner = inner
        self.layout = layout
        self._links = links
        self._options = options
        self._paddings = tuple(layout.paddings(links.own_slice, 1))
        self.kept = KeptCopy(inner.name, layout, links, dtype, links.home(is_host=False))
        self._payloads = cast(Tensor, self.kept.payloads)  # the storage of a copy that is on no full rung
        self.weight, self.momentum = (torch.zeros(layout.slice_numel, device=links.device) for _ in range(2))
        self._hops: list[Hop] = []
        self._before: Regions | None = None  # x at the begin of an exchange that ends one inner step late
        self.start_from_inner()

    def start_from_inner(self) -> None:
        """Starts from x, which has the same values on every island, without momentum."""
        for copy, x in self._pairs(self.kept.values):
            copy.copy_(x)
        # Not x: what c has lost of it is in the first outer gradient.
        Regions.of(self.weight, self.layout.slice_shape).copy_(self.kept.own)
        self.momentum.zero_()
        self.kept.share()

    def begin(self, codecs: OuterCodecs, iteration: int, *, takes_mean: bool) -> None:
        """Submits the hops of an exchange. x must not change until `finish`, or the call of `keep_step`.

        iteration: random codes are drawn from it. takes_mean: whether w becomes the mean of x over the islands.
        """
        layout, links, name = self.layout, self._links, self.inner.name
        gradient = self._parts_in_fp32()
        for (copy, x), (part, _) in zip(self._pairs(self.kept.values), self._pairs(gradient), strict=True):
            torch.sub(copy, x.to(copy.device), out=part)
        place = ("outer", name, self.inner.first_slice, iteration)
        of_gradients = codecs.gradients.with_noise_for(*place, links.data_rank).with_signs_for(links.topology, links.data_rank, *place)
        mean = torch.empty(layout.slice_numel, device=links.device)
        descent = links.descend_from_secondary(name, of_gradients.inter, gradient, Regions.of(mean, layout.slice_shape), accumulate=False)
        climb = self.kept.climb(Regions.of(self.weight, layout.slice_shape), codecs.differences, iteration)

        def step_and_encode(payload: Tensor) -> None:
            self._step(mean, takes_mean=takes_mean)
            climb.encode_own(payload)

        self._hops = [descent, links.climb_to_secondary(replace(climb, encode_own=step_and_encode), self._payloads, after=descent)]

    def _step(self, mean: Tensor, *, takes_mean: bool) -> None:
        """The outer step by the mean outer gradient [1 part], with the bits of torch.optim.SGD.

        takes_mean: without momentum, at a rate of 1.
        """
        for padding in self._paddings:
            mean[padding.start : padding.stop].zero_()  # codes write errors there
        if takes_mean:
            self.weight.sub_(mean)
            return
        momentum = self._options.momentum
        self.momentum.mul_(momentum).add_(mean)
        self.weight.add_(mean.add(self.momentum, alpha=momentum), alpha=-self._options.outer_rate)

    def keep_step(self) -> None:
        """Lets x change until `finish`, which then keeps what x has moved since now."""
        self._before = self._parts_in_fp32()
        for before, x in self._pairs(self._before):
            before.copy_(x)

    def wait(self) -> Traffic:
        """Waits for what crosses, and returns what it has brought. Then c is that after the exchange."""
        for hop in self._hops:
            self._links.lanes.wait(hop)
        traffic = sum((hop.traffic for hop in self._hops), Traffic())
        self._hops = []
        return traffic

    def forget(self) -> Traffic:
        """Waits for what crosses, and leaves x as it is, because all weights have been written anew."""
        self._before = None
        return self.wait()

    def finish(self) -> Traffic:
        """Waits for the exchange and writes x, which no climb may read. Returns what the hops have brought."""
        traffic = self.wait()
        if self._before is None:
            self.write_copy()
        else:
            self._add_exchange(self._before)
            self._before = None
        return traffic

    def _add_exchange(self, before: Regions) -> None:
        """x = c + what x has moved since it was `before`."""
        for (copy, x), (old, _) in zip(self._pairs(self.kept.values), self._pairs(before), strict=True):
            x.add_(torch.sub(copy, old).to(x.device))

    def write_copy(self) -> None:
        """x = c. No climb may read x."""
        for copy, x in self._pairs(self.kept.values):
            x.copy_(copy)

    def _parts_in_fp32(self) -> Regions:
        """Zeros for the whole slice, in N parts."""
        layout, links = self.layout, self._links
        return Regions.of(torch.zeros(links.partitions * layout.slice_numel, device=links.device), layout.slice_shape)

    def live_tensors(self) -> list[Tensor]:
        """The tensors that hold w, b and c."""
        return [self.weight, self.momentum, self._payloads]

    def _pairs(self, parts: Regions) -> Iterator[tuple[Tensor, Tensor]]:
        """The values of parts [N] and the elements of x that they stand for. What is beyond the end of one of them is padding."""
        for rows, x in zip(parts.parts(), self.inner.main_regions().parts(), strict=True):
            if rows.shape[1]:
                for row, elements in zip(rows, x.view(-1).split(rows.shape[1]), strict=False):
                    yield row[: elements.numel()], elements


def outer_layout(inner: FlatLayout, own_slice: int, islands: int) -> FlatLayout | None:
    """The layout of one slice of a unit over `islands` parts, with each element where the slice has it. None if the slice is all padding.

    Its parameters are the runs of elements between paddings: a run begins where a block begins, as parameters do.
    """
    params = [_run(run, is_exact=run.start >= inner.slice_shape.blocks) for run in inner.runs(own_slice, 1)]
    return FlatLayout(params, islands, inner.block_numel) if params else None


def _run(run: Range, *, is_exact: bool) -> ParamSpec:
    numel = run.stop - run.start
    division = Division.undivided((numel,) if is_exact else (1, numel))
    return ParamSpec(f"elements {run.start} to {run.stop - 1}", division, torch.zeros, weight_decay=False)
