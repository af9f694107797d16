"""The copy of one unit's weights that a rank keeps across steps, and brings up to date by differences.

It holds the N slices of this rank's secondary rung, in the working dtype. The ranks of a column keep equal copies of these slices, and each
of them owns one: it alone has the main weights of that slice. After a step

    every owner       encodes  main weights - own slice of the copy
    every rank        copy = working dtype (fp32 (copy) + decoded difference), for all N slices, its own as well

So all copies have the same bits, and what the code of a difference lost is part of the next difference. Parameters of one dimension (the
exact values) cross as values instead. The first version of a copy is a plain climb of the owners' slices; so is one after `restart`.

If main weights are kept on a host with memory of its own, differences are taken there, from a mirror of the own slice: it gets the same
values as the copy on the device, from the payload that is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_zpp.comm.codec import Codec, Regions
from megatron_zpp.comm.codecs import CastCodec, LinkCodecs
from megatron_zpp.comm.host_link import Home
from megatron_zpp.comm.links import Climb, Links
from megatron_zpp.zero.layout import FlatLayout, Range


class KeptCopy:
    """One rank's copy of one unit.

    values: [N slices] of the working dtype. own: this rank's slice of them, [1 slice], or its mirror.
    mirror: [slice_numel] of the working dtype on the host; None if main weights are beside the copy.
    whole_bytes: of the payload of a plain climb.
    payloads: [N, payload_bytes] uint8, the same storage as payloads of the intra link; None if the copy is a part of the full rung.
    """

    def __init__(self, name: str, layout: FlatLayout, links: Links, dtype: torch.dtype, home: Home, full: Tensor | None = None) -> None:
        """full: the full rung [numel], zeros, if the copy rests there. Otherwise the copy has storage of its own."""
        self._name = name
        self._layout = layout
        self._links = links
        self._link = home.link
        self._codec = CastCodec(dtype)
        self.whole_bytes = self._codec.payload_bytes(layout.slice_shape)
        self.payloads: Tensor | None = None
        first_slice = links.own_slice - links.topology.partition_of(links.data_rank)
        if full is None:
            self.payloads = torch.zeros(links.partitions, self.whole_bytes, dtype=torch.uint8, device=links.device)
            self.values = self._codec.regions_of(self.payloads, layout.slice_shape)
        else:
            self.values = Regions.of(full, layout.slice_shape).slices_at(first_slice, links.partitions)
        self._own_index = links.own_slice - first_slice
        self.mirror = home.zeros(layout.slice_numel, dtype) if home.link.copies else None
        self.own = self.values.slice_at(self._own_index) if self.mirror is None else Regions.of(self.mirror, layout.slice_shape)
        self._paddings = [tuple(layout.paddings(first_slice + index, 1)) for index in range(links.partitions)]
        self._is_shared = False
        self._own_is_filled = False

    def share(self) -> None:
        """Makes the next climb a difference: every rank of the column has filled its copy, with the same values."""
        self._is_shared = True

    def restart(self, *, own_is_filled: bool = False) -> None:
        """Makes the next climb a plain one. own_is_filled: whether it sends `own` as it is. Otherwise it sends the main weights."""
        self._is_shared = False
        self._own_is_filled = own_is_filled

    def climb(self, main: Regions, codecs: LinkCodecs, iteration: int) -> Climb:
        """The climb that brings the copy up to date: by differences, or as a whole if other ranks lack it or nothing is coded.

        main: the main weights of the own slice, [1 slice]. iteration: number of steps done; random codes are drawn from it.
        """
        name, slice_shape, links = self._name, self._layout.slice_shape, self._links
        if codecs.inter == self._codec:
            self.restart()
        if not self._is_shared:
            self._is_shared = True
            return Climb(
                name,
                slice_shape,
                LinkCodecs(self._codec, self._codec),
                lambda payload: self._link.encode(partial(self._encode_whole, main), payload),
            )
        signed = codecs.with_signs_for(links.topology, links.data_rank, "climb", name, iteration)
        return Climb(
            name,
            slice_shape,
            signed,
            lambda payload: self._link.encode(partial(self._encode_difference, main, signed.inter), payload),
            lambda arrived, payloads: self._add(signed, arrived, payloads),
        )

    def _encode_whole(self, main: Regions, payload: Tensor) -> None:
        if not self._own_is_filled:
            self.own.copy_(main)
        self._codec.encode_into(self.own, payload)

    def _encode_difference(self, main: Regions, codec: Codec, payload: Tensor) -> None:
        codec.encode_into(Regions(main.blocks - self.own.blocks, main.exact), payload)
        if self.mirror is not None:
            codec.of_sender(self._own_index).add_into(payload, self.own)
            self._clear_padding(codec, self.own, self._paddings[self._own_index])

    def _add(self, codecs: LinkCodecs, arrived: Tensor, payloads: Tensor) -> None:
        """Adds the differences in arrived [N, payload_bytes], one from each rank of the column, and fills the secondary rung.

        Padding is set to zero again if the code writes errors of neighbouring values there.
        """
        codecs.inter.add_into(arrived, self.values)
        for index, paddings in enumerate(self._paddings):
            self._clear_padding(codecs.inter, self.values.slice_at(index), paddings)
        if self.payloads is None:
            self._codec.encode_into(self.values, payloads)

    @staticmethod
    def _clear_padding(codec: Codec, values: Regions, paddings: Sequence[Range]) -> None:
        if codec.mixes_neighbours:
            for padding in paddings:
                values.range(padding.start, padding.stop).zero_()
