"""The copy of one unit's weights that a rank keeps across steps, and brings up to date by differences.

It holds the N slices of this rank's secondary rung, in the working dtype. The ranks of a column keep equal copies of these slices, and each
of them owns one: it alone has the main weights of that slice. After a step

    every owner       encodes  main weights - own slice of the copy
    every rank        copy = working dtype (fp32 (copy) + decoded difference), for all N slices, its own as well

So all copies have the same bits, and what the code of a difference lost is part of the next difference. Parameters of one dimension (the
exact run) cross as values instead. The first version of a copy is a plain climb of the owners' slices; so is one after `restart`.
"""

from __future__ import annotations

from torch import Tensor

from megatron_zpp.comm.codec import Codec, Regions
from megatron_zpp.comm.codecs import add_decoded_
from megatron_zpp.zero.layout import FlatLayout


class KeptCopy:
    """One rank's copy of one unit.

    values: [N slices] of the working dtype, views of the storage that the copy rests in. own: this rank's slice of them, [1 slice].
    is_shared: whether the other ranks of the column have the same copy, so that differences can be added to it. Otherwise the next climb is
    a plain one.
    """

    def __init__(self, layout: FlatLayout, values: Regions, first_slice: int, own_slice: int) -> None:
        """first_slice: the slice of the unit that comes first in `values`. own_slice: the slice that this rank owns."""
        self.values = values
        self.own = values.slice_at(own_slice - first_slice)
        self.is_shared = False
        self._own_is_filled = False
        self._paddings = [tuple(layout.paddings(first_slice + index, 1)) for index in range(values.slices)]

    def restart(self, *, own_is_filled: bool = False) -> None:
        """Makes the next climb a plain one. own_is_filled: whether it sends `own` as it is. Otherwise it sends the main weights."""
        self.is_shared = False
        self._own_is_filled = own_is_filled

    def encode_whole(self, main: Regions, codec: Codec, payload: Tensor) -> None:
        """Fills payload [1, payload_bytes] with the own slice, in a codec of its dtype. main: the main weights [1 slice]."""
        if not self._own_is_filled:
            self.own.copy_(main)
        codec.encode_into(self.own, payload)

    def encode_difference(self, main: Regions, codec: Codec, payload: Tensor) -> None:
        """Fills payload [1, payload_bytes] with what the own slice lacks of the main weights [1 slice]."""
        codec.encode_into(Regions(main.blocks - self.own.blocks, main.exact), payload)

    def add(self, codec: Codec, payloads: Tensor) -> None:
        """Adds the differences in payloads [N, payload_bytes], one from each rank of the column.

        Padding is set to zero again, because a code may write errors of neighbouring values there.
        """
        add_decoded_(codec, payloads, self.values)
        if codec.mixes_neighbours:
            for index, paddings in enumerate(self._paddings):
                for padding in paddings:
                    self.values.slice_at(index).range(padding.start, padding.stop).zero_()
