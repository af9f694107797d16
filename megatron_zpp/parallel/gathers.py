"""Gathers a few numbers of every rank: inside every node, then between the first ranks of the nodes, then back into every node.

So each number enters every other node once, however many ranks that has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from megatron_zpp.parallel.groups import WorldGroups

Gather = Callable[[Tensor, dist.ProcessGroup | None], Tensor]
# torch 2.13 renames the collective and warns at every call by the old name.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gather_levels(own: Tensor, groups: WorldGroups, gather: Gather | None = None) -> Tensor:
    """[ranks, numel]: `own` [numel] of every rank of the world, in rank order. Every rank must call it, and waits.

    gather: that of each level, which returns [members, numel]. By default for a few numbers, each of which costs little but its latency.
    """
    own, gather = own.detach(), gather or _gather
    if groups.node is None:
        return gather(own, groups.between)
    of_node = gather(own, groups.node)
    if groups.node.rank() == 0:
        if groups.between is None:
            raise RuntimeError("the first rank of a node has no group of first ranks")
        of_all = gather(of_node, groups.between).flatten()
    else:
        of_all = own.new_empty(groups.nodes * of_node.numel())
    dist.broadcast(of_all, dist.get_global_rank(groups.node, 0), groups.node)
    return of_all.view(-1, own.numel())


def gather_rounds(own: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """[members, numel]: `own`, on the CPU, of every member, in member order. Every member must call it, and waits.

    group: by default that of all ranks of torch.distributed. For small messages, each of which costs little more than its latency.
    gloo's own gather goes around a ring: each of M members waits for M - 1 messages, one after the other. In the rounds here a member has
    twice as many rows after each (Bruck's algorithm). So it waits for `rounds(M)` messages, and has at most twice as many peers.
    A sender over gloo waits until its receiver has asked for the message, so all are asked for at once.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed has not connected the ranks")
    rank, members = group.rank(), group.size()
    rows = own.new_empty(members, own.numel())
    rows[0].copy_(own.flatten())
    knows = [2**number for number in range(rounds(members))]  # rows, of this member and of those after it, before each round
    receiving = [group.recv([rows[known : 2 * known]], (rank + known) % members, 0) for known in knows]
    sending = []
    for known, received in zip(knows, receiving, strict=True):
        sending.append(group.send([rows[: min(known, members - known)]], (rank - known) % members, 0))
        received.wait()
    for sent in sending:
        sent.wait()
    return rows.roll(rank, 0)


def gather_around(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[members, numel], as gather_rounds, but around gloo's ring. For texts: each enters a node once, if its ranks are neighbours."""
    members = dist.get_world_size(group)
    rows = own.new_empty(members, own.numel())
    dist.all_gather(list(rows), own.flatten(), group=group)
    return rows


def rounds(members: int) -> int:
    """The messages that a member waits for, one after the other: log2 of their number, rounded up."""
    return (members - 1).bit_length()


def _gather(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[members, numel], as gather_rounds does over gloo. NCCL chooses its own algorithm."""
    if not own.is_cuda:
        return gather_rounds(own, group)
    rows = own.new_empty(dist.get_world_size(group), own.numel())
    all_gather(rows.view(-1), own.flatten(), group=group)
    return rows
