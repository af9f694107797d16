"""Makes the hops of climbs and descents. Weights climb by all-gathers; gradients descend by exchanges of slices, each followed by a mean.

For one unit on the rank at place j of partition n, with D = N x G data ranks in N partitions, and payloads in slice order:

    climb     own slice --inter: gather N--> secondary payloads --intra: gather G--> all D payloads --decode--> full
    descend   full --encode D, intra: exchange G, mean--> N slices --encode, inter: exchange N, mean--> own slice

Over a link of one rank no bytes cross, and gradients are not encoded for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_zpp.comm.backend import Backend, Work
from megatron_zpp.comm.code import SliceShape
from megatron_zpp.comm.codec import Codec, Regions
from megatron_zpp.comm.codecs import LinkCodecs
from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.comm.hop_order import HopOrder
from megatron_zpp.comm.host_link import HOST, Home, HostLink
from megatron_zpp.comm.lanes import Hop, Lanes, nothing
from megatron_zpp.comm.ledger import Category, Ledger
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.streams import Streams, streams_of
from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.comm.waits import Waits
from megatron_zpp.parallel.topology import Direction, Lane, Link

INTER_CLIMB = Lane(Link.INTER, Direction.CLIMB)
INTRA_CLIMB = Lane(Link.INTRA, Direction.CLIMB)
INTRA_DESCEND = Lane(Link.INTRA, Direction.DESCEND)
INTER_DESCEND = Lane(Link.INTER, Direction.DESCEND)


@dataclass(frozen=True)
class Climb:
    """How one unit climbs to its secondary rung. slice_shape: of each slice.

    encode_own: fills the payload [1, payload_bytes] of the own slice, in the inter link's codec.
    arrive: makes from the payloads [N, payload_bytes] of the column those of the secondary rung, in the intra link's codec. By default they
    are decoded and encoded again, or taken as they are if both links have the same codec.
    """

    name: str
    slice_shape: SliceShape
    codecs: LinkCodecs
    encode_own: Callable[[Tensor], None]
    arrive: Callable[[Tensor, Tensor], None] | None = None

    @property
    def passes_through(self) -> bool:
        """Whether what comes over the inter link is the secondary rung itself."""
        return self.arrive is None and self.codecs.inter == self.codecs.intra

    def fill(self, arrived: Tensor, payloads: Tensor) -> None:
        """Fills the secondary rung from what has come over the inter link."""
        if self.arrive is not None:
            self.arrive(arrived, payloads)
        else:
            self.codecs.inter.recode_mean_into(arrived.unsqueeze(0), self.codecs.intra, payloads, self.slice_shape)


class Links:
    """One rank's links inside its node and between nodes: makes the hops of climbs and descents and submits them to their lanes.

    streams: those that `lanes` use; by default those of `device`. waits: of the tensor and the context link; lanes have their own.
    tensor_link: to the ranks of the other ladders that have the same tokens; None if there is one ladder.
    context_link: to the ranks of this ladder that have other tokens of the same samples; None if there are none.
    host_link: to the memory of the host, where an optimizer may be kept.
    hop_order: of the hops of this rank in which other ranks take part. ranks: what each rank of the grid is called in errors.
    """

    def __init__(
        self,
        backend: Backend,
        lanes: Lanes,
        ledger: Ledger,
        device: torch.device,
        streams: Streams | None = None,
        waits: Waits | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.grid = backend.grid
        self.topology = backend.grid.ladder
        self.backend = backend
        self.lanes = lanes
        self.ledger = ledger
        self.device = device
        self.data_rank = self.grid.data_rank_of(backend.rank)
        self.tensor_rank = self.grid.tensor_rank_of(backend.rank)
        self.streams = streams or streams_of(device)
        self.staging = staging or Staging(device, self.streams)
        self.host_link = HostLink(self.streams, device if device.type == "meta" else HOST)
        self.hop_order = HopOrder()
        self.waits = waits or Waits()
        self.ranks = self.waits.ranks or range(self.grid.world_size)
        parts = (backend, ledger, self.staging, self.streams, self.waits)
        self.tensor_link = TensorLink(*parts) if self.grid.tensor_ranks > 1 else None
        self.context_link = ContextLink(*parts) if self.grid.context_ranks > 1 else None
        self.partitions = self.topology.partitions
        self.partition_ranks = self.topology.partition_ranks
        self.own_slice = self.topology.slice_of(self.data_rank)

    def home(self, *, is_host: bool) -> Home:
        """Where main weights and moments are kept: in the memory of the host, or on the device."""
        if is_host:
            return Home(self.host_link.host, self.host_link, runs_behind=False, is_host=True)
        return Home(self.device, HostLink(None), runs_behind=self.streams is not None)

    def climb_to_secondary(self, climb: Climb, payloads: Tensor, after: Hop | None = None) -> Hop:
        """The hop that fills `payloads` [N, payload_bytes], a secondary rung in the intra link's codec, with the own slices of the column.

        With one partition nothing crosses. The hop still encodes the own slice, so that the lane does this beside computation and the hop
        over the intra link can wait for it.
        """
        codecs, name = climb.codecs, climb.name
        if self.partitions == 1:
            return self._submit(Hop(name, INTER_CLIMB, nothing, nothing, after=after, prepare=lambda: climb.encode_own(payloads)))
        own_bytes = codecs.inter.payload_bytes(climb.slice_shape)
        buffers: list[Tensor] = []

        def prepare() -> None:
            buffers.append(self.staging.take(own_bytes))
            climb.encode_own(buffers[0].view(1, -1))

        def launch() -> Work | None:
            if not climb.passes_through:
                buffers.append(self.staging.take(self.partitions * own_bytes))
            return self.backend.all_gather(INTER_CLIMB, payloads.view(-1) if climb.passes_through else buffers[1], buffers[0])

        def land() -> None:
            if not climb.passes_through:
                climb.fill(buffers[1].view(-1, own_bytes), payloads)
            while buffers:
                self.staging.give(buffers.pop())

        return self._submit(Hop(name, INTER_CLIMB, launch, land, after, self.ledger.measure(Link.INTER, own_bytes), prepare))

    def climb_to_full(self, name: str, codec: Codec, payloads: Tensor, full: Regions, after: Hop | None) -> Hop:
        """The hop that fills `full` [D slices] from the secondary rungs of this partition. payloads: this rank's, [N, payload_bytes]."""
        if self.partition_ranks == 1:
            return self._submit(Hop(name, INTRA_CLIMB, nothing, lambda: codec.decode_into(payloads, full), after))
        gathered: list[Tensor] = []

        def launch() -> Work | None:
            gathered.append(self.staging.take(self.partition_ranks * payloads.numel()))
            return self.backend.all_gather(INTRA_CLIMB, gathered[0], payloads.view(-1))

        def land() -> None:
            codec.decode_into(gathered[0].view(-1, payloads.shape[1]), full)
            self.staging.give(gathered.pop())

        traffic = self.ledger.measure(Link.INTRA, payloads.numel())
        return self._submit(Hop(name, INTRA_CLIMB, launch, land, after, traffic))

    def descend(self, name: str, codecs: LinkCodecs, full: Regions, primary: Regions, *, accumulate: bool) -> list[Hop]:
        """The hops that bring the mean of `full` [D slices] over all data ranks to the fp32 `primary` [1 slice]; the last one writes it."""
        if self.partitions == 1:
            return [self.descend_to_secondary(name, codecs.intra, full, primary, accumulate=accumulate)]
        if self.partition_ranks == 1:
            return [self.descend_from_secondary(name, codecs.inter, full, primary, accumulate=accumulate)]
        within = _Exchange(self, INTRA_DESCEND, codecs.intra, full.slice_shape, full.slices)
        across = _Exchange(self, INTER_DESCEND, codecs.inter, full.slice_shape, self.partitions)

        def prepare() -> None:
            within.prepare(lambda payloads: codecs.intra.encode_into(full, payloads))

        def recode(payloads: Tensor) -> None:
            codecs.intra.recode_mean_into(within.received(), codecs.inter, payloads, full.slice_shape)
            within.release()

        first = Hop(name, INTRA_DESCEND, within.launch, nothing, None, within.traffic, prepare)
        prepare_last, land_last = partial(across.prepare, recode), partial(across.land, primary, accumulate)
        last = Hop(name, INTER_DESCEND, across.launch, land_last, first, across.traffic, prepare_last)
        return [self._submit(first), self._submit(last)]

    def descend_to_secondary(self, name: str, codec: Codec, full: Regions, secondary: Regions, *, accumulate: bool) -> Hop:
        """The hop that brings the mean of `full` [D slices] over the ranks of this partition to the fp32 `secondary` [N slices]."""
        return self._submit(self._descent(name, INTRA_DESCEND, codec, full, secondary, accumulate))

    def descend_from_secondary(
        self, name: str, codec: Codec, secondary: Regions, primary: Regions, *, accumulate: bool, after: Hop | None = None
    ) -> Hop:
        """The hop that brings the mean of `secondary` [N slices] over the partitions to the fp32 `primary` [1 slice]."""
        return self._submit(replace(self._descent(name, INTER_DESCEND, codec, secondary, primary, accumulate), after=after))

    def _descent(self, name: str, lane: Lane, codec: Codec, values: Regions, mean: Regions, accumulate: bool) -> Hop:
        if self.topology.link_ranks(lane.link) == 1:
            return Hop(name, lane, nothing, lambda: _add_or_copy(values, mean, accumulate))
        exchange = _Exchange(self, lane, codec, values.slice_shape, values.slices)

        def prepare() -> None:
            exchange.prepare(lambda payloads: codec.encode_into(values, payloads))

        return Hop(name, lane, exchange.launch, partial(exchange.land, mean, accumulate), None, exchange.traffic, prepare)

    def gather_world(self, own: Tensor) -> Tensor:
        """`own` [numel] of every rank, [data ranks, tensor ranks, numel]; for a few numbers. Every rank must call it, and waits."""
        self.ledger.book(Category.CONTROL, self.ledger.measure_world(own.nbytes))
        return self.backend.gather_world(own)

    def _submit(self, hop: Hop) -> Hop:
        if hop.launch is not nothing:
            self.hop_order.add(hop.lane, hop.name)
        self.lanes.submit(hop)
        return hop


class _Exchange:
    """The payloads of one descent over one link: this rank sends `slices` of them, an equal share to each member, and receives as many."""

    def __init__(self, links: Links, lane: Lane, codec: Codec, slice_shape: SliceShape, slices: int) -> None:
        self._links = links
        self._lane = lane
        self._codec = codec
        self._members = links.topology.link_ranks(lane.link)
        self._slices = slices
        self._payload_bytes = codec.payload_bytes(slice_shape)
        self._buffers: list[Tensor] = []
        self.traffic = links.ledger.measure(lane.link, slices // self._members * self._payload_bytes)

    def prepare(self, encode: Callable[[Tensor], None]) -> None:
        """Calls `encode` with the payloads [slices, payload_bytes] to fill."""
        self._buffers = [self._take()]
        encode(self._buffers[0].view(self._slices, self._payload_bytes))

    def launch(self) -> Work | None:
        """Starts the exchange of what was prepared."""
        self._buffers.append(self._take())
        sent, received = self._buffers
        return self._links.backend.exchange(self._lane, received, sent)

    def received(self) -> Tensor:
        """[members, slices / members, payload_bytes], once the exchange has ended."""
        return self._buffers[1].view(self._members, -1, self._payload_bytes)

    def _take(self) -> Tensor:
        return self._links.staging.take(self._slices * self._payload_bytes)

    def land(self, mean: Regions, accumulate: bool) -> None:
        self._codec.decode_mean_into(self.received(), mean, accumulate=accumulate)
        self.release()

    def release(self) -> None:
        for buffer in self._buffers:
            self._links.staging.give(buffer)
        self._buffers = []


def _add_or_copy(values: Regions, mean: Regions, accumulate: bool) -> None:
    if accumulate:
        mean.add_(values)
    else:
        mean.copy_(values)
