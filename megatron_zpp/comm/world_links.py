"""Connects the ranks of torch.distributed as one world, or as several that are arranged alike: islands, or the columns between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_zpp.comm.asking_lanes import AskingLanes
from megatron_zpp.comm.backend import Backend, TorchBackend
from megatron_zpp.comm.first_messages import send_first_messages
from megatron_zpp.comm.lanes import Lanes, make_lanes, nothing
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.observed_lanes import ObservedLanes
from megatron_zpp.comm.streams import streams_of
from megatron_zpp.comm.waits import Waits
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import end_group, make_lane_groups, make_world_groups

_made = itertools.count()  # every rank makes them in the same order


def has_world() -> bool:
    """Whether torch.distributed has connected the ranks."""
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True)
class WorldLinks:
    """The links of one rank, and the process groups that were made for them alone."""

    links: Links
    groups: Sequence[dist.ProcessGroup]

    @classmethod
    def over(cls, backend: Backend, device: torch.device, observer: Observer) -> WorldLinks:
        """Those over a backend that is there already. observer: of hops."""
        return cls(_links(backend, make_lanes(streams_of(device)), device, Waits(observer=observer)), ())

    @classmethod
    def connect(
        cls,
        grid: Grid,
        worlds: Sequence[Sequence[int]],
        device: torch.device,
        timeout: timedelta,
        waits: Waits,
        connecting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> WorldLinks:
        """Those among the ranks of torch.distributed, each of which must call it.

        worlds: for each world that is arranged as `grid`, its ranks in that order. Each rank is in one of them. timeout: of each group.
        waits: of all links. Without a watch, errors of lanes say what each rank has asked for last. connecting: gives the context in which
        each group is made.
        On a GPU the ranks are connected at once: NCCL would do it in the first step, and its buffers would not be in what is free.
        """
        if not has_world():
            return cls.over(TorchBackend(grid, 0, {}), device, waits.observer)
        index, own = next((index, world) for index, world in enumerate(worlds) if dist.get_rank() in world)
        rank, streams, name = own.index(dist.get_rank()), streams_of(device), f"megatron_zpp/lanes/{next(_made)}/{index}"
        of_lanes = make_lane_groups(grid, dist.get_rank(), timeout, device, connecting, worlds)
        world = make_world_groups(grid, worlds, dist.get_rank(), timeout, device, connecting)
        backend = TorchBackend(grid, rank, of_lanes, world)
        asks = waits.watch is None and streams is None and len(of_lanes) > 0
        lanes = _asking_lanes(name, rank, grid.world_size) if asks else make_lanes(streams, waits.watch or nothing)
        if streams is not None:
            send_first_messages(backend, lanes, device, own)
        return cls(_links(backend, lanes, device, replace(waits, ranks=own)), (*of_lanes.values(), *world.made()))

    def end(self) -> None:
        """Ends the groups, once no rank needs them any more."""
        self.links.gather_world(torch.zeros(1, device=self.links.device))
        self.links.lanes.drain()  # until the gather has ended; on a GPU it has only been enqueued
        for group in self.groups:
            end_group(group)


def _links(backend: Backend, lanes: Lanes, device: torch.device, waits: Waits) -> Links:
    if type(waits.observer) is not Observer:  # which would see nothing
        lanes = ObservedLanes(lanes, waits.observer)
    return Links(backend, lanes, Ledger(backend.grid, backend.rank), device, waits=waits)


def _asking_lanes(name: str, rank: int, world_size: int) -> Lanes:
    """Lanes whose errors say what each rank has asked for last."""
    return AskingLanes(dist.PrefixStore(name, dist.distributed_c10d._get_default_store()), rank, world_size)
