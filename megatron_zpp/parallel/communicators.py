"""The NCCL communicators of a rank: how much of a GPU their kernels may hold, and the memory of their buffers (no torch).

A kernel of NCCL stays on the GPU until its peers have answered. If those of several communicators do not fit beside each other, one of
them may wait for another that waits for a peer, and no rank goes on. NCCL therefore asks that all of them fit at once. A CTA (CUDA's block
of threads) of NCCL occupies one multiprocessor (SM), of which an A100 has 108 and an H100 132.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.parallel.grid import Grid, Peers
from megatron_zpp.parallel.topology import ACROSS_LANES, CONTEXT_ACROSS, LANES, TENSOR_ACROSS, Direction, Lane, Link

MEBIBYTE = 2**20

# The most CTAs of one communicator. They are powers of two, because NCCL rounds the channels of an exchange up to one. A CTA moves about
# 20 GB/s over NVLink (commonly reported, not measured here): 16 are near the rate of the link inside a node, for what computation waits for
# most: the tensor link, which every layer waits for, without one the context link, and without both the climbs. An exchange of gradients
# with many peers would need gigabytes of buffers for as many. 8 are more than a network of 400 Gbit/s per GPU needs. All communicators
# have 42 CTAs, 50 with one of these links, and 54 with both, where the context link has as many as a network needs. So no more than half of
# an A100 waits for links at the worst moment; islands of several nodes have 17 more between them. NCCL_MAX_CTAS in the environment
# wins; NCCL reads it.
FAST_CTAS, LANE_CTAS, CONTEXT_CTAS = 16, 8, 4
WORLD_CTAS = 1  # of each of the two levels in which a few numbers per step are gathered

# Bytes from NCCL 2.30. Each channel to a peer has a buffer for each of three protocols (init.cc, computeBuffSizes: 512 KiB of LL, 4800 KiB
# of LL128, 4 MiB of Simple) and rounds their sum up to 2 MiB (transport/p2p.cc).
CONNECTION_BYTES = 10 * MEBIBYTE
FLAGS_BYTES = 2 * MEBIBYTE  # what the sender holds of a connection inside a node, rounded up
# Exchanges over the network share one buffer per direction (transport/net.cc, sharedNetBuffersInit): 16 steps of 128 KiB per channel.
SHARED_BYTES = 2 * MEBIBYTE
# A gather by NVLink SHARP, which Hopper and later GPUs have: 2 x 8 steps of 128 KiB per channel and member (transport/nvls.cc).
MULTICAST_BYTES = 2 * MEBIBYTE


@dataclass(frozen=True)
class Communicator:
    """A communicator of one rank. local_peers, remote_peers: its other members on the rank's node and elsewhere. ctas: its limit.

    exchanges: whether every member sends to every other. gathers: whether it gathers.
    """

    local_peers: int
    remote_peers: int
    ctas: int
    exchanges: bool
    gathers: bool

    def buffer_bytes(self) -> int:
        """The most memory of the GPU that its buffers take, with NCCL's default sizes and one channel per CTA."""
        return self.ctas * (self.exchanges * self._exchange_bytes() + self.gathers * self._gather_bytes())

    def _exchange_bytes(self) -> int:
        """Of one channel."""
        return self.local_peers * (CONNECTION_BYTES + FLAGS_BYTES) + (2 * SHARED_BYTES if self.remote_peers else 0)

    def _gather_bytes(self) -> int:
        """Of one channel. Around a ring a rank receives from one peer, and sends to one."""
        of_ring = CONNECTION_BYTES + (CONNECTION_BYTES if self.remote_peers else FLAGS_BYTES)
        return of_ring + (MULTICAST_BYTES * (1 + self.local_peers) if self.local_peers else 0)


def lane_ctas(grid: Grid, lane: Lane) -> int:
    """The most CTAs of the lane's communicator."""
    in_order = (TENSOR_ACROSS, CONTEXT_ACROSS, Lane(Link.INTRA, Direction.CLIMB))
    fast = next((fast for fast in in_order if grid.link_ranks(fast.link) > 1), None)
    if lane == fast:
        return FAST_CTAS
    return CONTEXT_CTAS if lane == CONTEXT_ACROSS else LANE_CTAS


def communicators(grid: Grid) -> tuple[Communicator, ...]:
    """The communicators of the first rank of a node: one for each lane whose link has more than one rank, and those of the world.

    The world has one in the node and one between nodes, which the other ranks of a node do not have.
    """
    if grid.world_size == 1:
        return ()
    of_lanes = [
        Communicator(
            *grid.peers(lane.link, 0),
            lane_ctas(grid, lane),
            exchanges=lane.direction is not Direction.CLIMB,
            gathers=lane.direction is Direction.CLIMB or lane == TENSOR_ACROSS,
        )
        for lane in (*LANES, *ACROSS_LANES)
        if grid.link_ranks(lane.link) > 1
    ]
    levels = (Peers(grid.ranks_per_node - 1, 0), Peers(0, grid.nodes - 1))
    return (*of_lanes, *(Communicator(*peers, WORLD_CTAS, exchanges=False, gathers=True) for peers in levels if any(peers)))
