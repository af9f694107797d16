"""The codecs of both links in one direction, and the keys of their random numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from megatron_zpp.comm.code import LinkCodes
from megatron_zpp.comm.codec import Codec, SignKeys
from megatron_zpp.comm.codecs import CodecFactory, make_codec
from megatron_zpp.parallel.topology import LADDER_LINKS, Link, Topology

KEY_BITS = 63  # of a key of stochastic rounding, or of the signs of a rotation


@dataclass(frozen=True)
class LinkCodecs:
    """The codec of each link, in one direction. noise_seed: seed of stochastic rounding, for codecs that have it."""

    inter: Codec
    intra: Codec
    noise_seed: int = 0

    @classmethod
    def of(cls, codes: LinkCodes, dtype: torch.dtype, block_numel: int, noise_seed: int = 0, make: CodecFactory = make_codec) -> LinkCodecs:
        """The codecs of `codes`, which LinkCodes.in_world has fitted to this world. make: makes one codec."""
        return cls(make(codes.inter, dtype, block_numel), make(codes.intra, dtype, block_numel), noise_seed)

    @property
    def any_mixes_neighbours(self) -> bool:
        """Whether errors of values spread to their neighbours, which may be padding, on at least one link."""
        return self.inter.mixes_neighbours or self.intra.mixes_neighbours

    def drawn_for(self, *place: int | str) -> LinkCodecs:
        """The same codecs, whose stochastic rounding draws from `place`: the same numbers in every run, others at every other place."""
        inter, intra = (
            codec.keyed(noise_key(self.noise_seed, link.name, *place))
            for link, codec in ((Link.INTER, self.inter), (Link.INTRA, self.intra))
        )
        return replace(self, inter=inter, intra=intra)

    def signed_for(self, topology: Topology, data_rank: int, *place: int | str) -> LinkCodecs:
        """The same codecs, which rotate with random signs drawn from `place` and the data rank of the sender.

        place: of a hop, such as direction, unit, iteration and micro-batch; the same on all members of the link.
        """
        inter, intra = (
            codec.signed(sign_keys(self.noise_seed, link, topology, data_rank, *place)) if codec.mixes_neighbours else codec
            for link, codec in zip(LADDER_LINKS, (self.inter, self.intra), strict=True)
        )
        return replace(self, inter=inter, intra=intra)


def sign_keys(seed: int, link: Link, topology: Topology, data_rank: int, *place: int | str) -> SignKeys:
    """The keys of signs of all members of the link that `data_rank` shares. Every member computes the same, with another one as its own."""
    keys = {sender: noise_key(seed, "signs", link.name, sender, *place) for sender in topology.members(link, data_rank)}
    return SignKeys(keys[data_rank], tuple(keys.values()))


def noise_key(*place: int | str) -> int:
    """A 63-bit number computed from `place` alone, so it is the same in every process, on every machine and after a restart."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - KEY_BITS)
