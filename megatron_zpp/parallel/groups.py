"""Makes the process groups of the lanes, in the same order on every rank, and ends all groups."""

from __future__ import annotations

import atexit
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.parallel.communicators import WORLD_CTAS, lane_ctas
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import ACROSS_LANES, LANES, Lane

LEGACY_NCCL = "nccl-legacy"
GROUPS_END_WITHOUT_LOCK = "2.8"  # version of torch
# When a collective has failed or timed out, torch waits four times as long before it ends the process, so that every rank can write what it
# has recorded. Its default is 15 seconds, so a rank would end a minute after --distributed-timeout-minutes.
RECORD_VARIABLE, RECORD_MILLISECONDS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 1000
_kept_backends: list[object] = []


def make_lane_groups(
    grid: Grid,
    rank: int,
    timeout: timedelta,
    device: torch.device,
    connecting: Callable[[], AbstractContextManager[None]] = nullcontext,
    worlds: Sequence[Sequence[int]] = (),
) -> dict[Lane, dist.ProcessGroup]:
    """The process group of `rank` for each lane, those across too, whose link has more than one rank; every rank of torch.distributed must
    call it.

    worlds: if those ranks are several worlds that are arranged alike, the ranks of each, in the order of `grid`. Each rank is in one.
    timeout: passed to each group, because a new group does not inherit that of the world.
    device: on CUDA the groups have NCCL alone. By default they would have all backends of the world, and connect every member by gloo.
    connecting: gives the context in which each group is made.

    The groups are independent of the world's communicator. To split them off that one (split_group, or a device_id for the world), each
    split would be a collective of all ranks of the world, while a new group concerns its members only. NCCL connects them when the
    first message is sent (comm/first_messages.py).
    """
    own: dict[Lane, dist.ProcessGroup] = {}
    for lane in (*LANES, *ACROSS_LANES):
        if grid.link_ranks(lane.link) == 1:
            continue
        group = _own_group(_members(grid, lane, worlds), rank, connecting, partial(_backend_arguments, grid, lane, timeout, device))
        if group is not None:
            own[lane] = group
    return own


def _members(grid: Grid, lane: Lane, worlds: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The ranks of torch.distributed in each group of a lane."""
    for world in worlds or [range(grid.world_size)]:
        for members in grid.groups(lane.link):
            yield [world[member] for member in members]


@dataclass(frozen=True)
class WorldGroups:
    """The process groups in which all ranks of a world gather a few numbers, or texts.

    node: of the ranks of this rank's node, or of other neighbours; None where no two ranks are in one, or all are. nodes: the number of
    those groups, if there is one.
    between: of the first ranks of all nodes, of which this rank may be one. If `node` is None, of all ranks, by default torch's own group.
    """

    node: dist.ProcessGroup | None = None
    between: dist.ProcessGroup | None = None
    nodes: int = 1

    def made(self) -> list[dist.ProcessGroup]:
        """Those that have to be ended."""
        return [group for group in (self.node, self.between) if group is not None]


def make_world_groups(
    grid: Grid,
    worlds: Sequence[Sequence[int]],
    rank: int,
    timeout: timedelta,
    device: torch.device,
    connecting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> WorldGroups:
    """The groups of the world that `rank` is in. Every rank of torch.distributed must call it. The arguments: as of `make_lane_groups`."""
    own_of = partial(_own_group, rank=rank, connecting=connecting, arguments=partial(_world_arguments, timeout, device))
    of_node = grid.ranks_per_node
    if len(worlds) == 1 and 1 in (grid.nodes, of_node):
        return WorldGroups()
    return _levels(worlds, of_node, own_of)


def make_text_groups(
    world_size: int,
    rank: int,
    timeout: timedelta,
    connecting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> WorldGroups:
    """Groups of gloo in which all ranks of torch.distributed, each of which must call it, gather texts: torch's own group if it has gloo,
    as on CPUs. The arguments: as of `make_lane_groups`.

    gloo connects all members of a group when it is made, and each reads the address of every other from the store. So the ranks are in
    groups of about the square root of their number, of neighbours and of the first of these: a rank reads about 2 D**0.5 addresses, not D.
    """
    if _torch_has_gloo():
        return WorldGroups()
    neighbours = max(size for size in range(1, math.isqrt(world_size) + 1) if world_size % size == 0)
    arguments: Callable[[], dict[str, Any]] = partial(dict, timeout=timeout, backend="gloo")
    return _levels([range(world_size)], neighbours, partial(_own_group, rank=rank, connecting=connecting, arguments=arguments))


def _torch_has_gloo() -> bool:
    """Whether torch's own group can send tensors of the CPU."""
    group = dist.group.WORLD
    return group is not None and torch.device("cpu") in group._device_types


def _levels(
    worlds: Sequence[Sequence[int]], of_node: int, own_of: Callable[[Iterable[Sequence[int]]], dist.ProcessGroup | None]
) -> WorldGroups:
    """The groups of one rank, with so many ranks of its world in each group of neighbours. own_of: makes groups, and returns its own."""
    size = len(worlds[0])
    if of_node in (1, size):
        return WorldGroups(between=own_of(worlds))
    nodes = [world[first : first + of_node] for world in worlds for first in range(0, size, of_node)]
    return WorldGroups(own_of(nodes), own_of(world[::of_node] for world in worlds), size // of_node)


def _own_group(
    groups: Iterable[Sequence[int]],
    rank: int,
    connecting: Callable[[], AbstractContextManager[None]],
    arguments: Callable[[], dict[str, Any]],
) -> dist.ProcessGroup | None:
    """Makes all groups, and returns the one that `rank` is in, or None. arguments: makes those of new_group, which no two groups share."""
    own = None
    for ranks in groups:
        with connecting():
            group = dist.new_group(list(ranks), **arguments())
        if rank in ranks:
            own = group
    return own


def _backend_arguments(grid: Grid, lane: Lane, timeout: timedelta, device: torch.device) -> dict[str, Any]:
    """Of the group of a lane. NCCL's log lines and errors contain the description."""
    if device.type != "cuda":
        return {"timeout": timeout}
    options = _nccl_options(lane_ctas(grid, lane), timeout, is_urgent=True)
    return {"timeout": timeout, "backend": nccl_backend(), "pg_options": options, "group_desc": f"lane {lane}"}


def _world_arguments(timeout: timedelta, device: torch.device) -> dict[str, Any]:
    """Of a group for numbers."""
    backend = nccl_backend() if device.type == "cuda" else None
    return {"timeout": timeout, "backend": backend, "pg_options": world_options(timeout, device)}


@cache
def nccl_backend() -> str:
    """The name of torch's NCCL groups that are independent, connect when they first send, and take the GPU of the tensors they are given.

    Under "nccl", torch 2.15 has others: each is split off the world's, and the GPU of a rank is that of LOCAL_RANK.
    """
    return LEGACY_NCCL if entry_points(group="torch.distributed.backends", name=LEGACY_NCCL) else "nccl"


def world_options(timeout: timedelta, device: torch.device) -> Any:
    """The options of the world's process group; None where it has no NCCL."""
    return _nccl_options(WORLD_CTAS, timeout, is_urgent=False) if device.type == "cuda" else None


def shorten_records() -> None:
    """Shortens the time from a failed collective to the end of the process, unless the environment says how long it is.

    Call it before the first process group is made.
    """
    os.environ.setdefault(RECORD_VARIABLE, str(RECORD_MILLISECONDS))


def _nccl_options(ctas: int, timeout: timedelta, *, is_urgent: bool) -> Any:
    """New options with this limit of CTAs; torch changes those that it is given, so no two groups may share them.

    is_urgent: the priority of the stream that old versions of torch run collectives in; newer ones run them in the caller's.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_urgent)
    options.config.max_ctas = ctas
    options._timeout = timeout  # torch warns if it differs from the argument of that name
    return options


def end_group(group: dist.ProcessGroup) -> None:
    """Ends a process group; no message of it may be under way. Every rank of it must call it."""
    _keep_backends([group])
    dist.destroy_process_group(group)


def end_world() -> None:
    """Ends all process groups; every rank must call it, once no rank needs them any more.

    Objects that still hold a collective are freed now: gloo's threads must not free them while the interpreter shuts down.
    """
    _keep_backends(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    gc.collect()
    _kept_backends.clear()


def _keep_backends(groups: Iterable[dist.ProcessGroup]) -> None:
    """Keeps gloo's part of the groups until the world has ended, or the program ends, so that no rank waits forever.

    Until torch 2.7 a group that is freed waits for gloo's threads and holds Python's lock, which they need if they free the last collective
    at that moment (https://github.com/pytorch/pytorch/pull/154976). Gloo's part waits for them as well, but without the lock.
    """
    if torch.__version__ >= GROUPS_END_WITHOUT_LOCK:
        return
    if not _kept_backends:
        atexit.register(_kept_backends.clear)
    cpu = torch.device("cpu")
    _kept_backends.extend(group._get_backend(cpu) for group in groups if cpu in group._device_types)
