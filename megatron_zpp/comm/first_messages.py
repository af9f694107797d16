"""Sends first messages over the world and every lane, so that connections exist before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from megatron_zpp.comm.backend import Backend
from megatron_zpp.comm.lanes import Hop, Lanes, nothing
from megatron_zpp.parallel.ranks_in_words import ranks_in_words
from megatron_zpp.parallel.topology import ACROSS_LANES, LANES, TENSOR_ACROSS, Direction, Lane


def send_first_messages(backend: Backend, lanes: Lanes, device: torch.device, ranks: Sequence[int] | None = None) -> None:
    """Sends one byte to each peer, over the world, and over one lane after the other. Every rank must call it, and waits.

    NCCL makes a communicator at its first collective, and connects peers for each kind of collective at its first use. So each lane
    carries the kind that it will carry in every step, in its own stream; the tensor link carries both kinds and the context link exchanges,
    in the current stream. Larger messages may still open more connections.
    ranks: what each rank of the grid is called in errors; by default as in the grid. Raises RuntimeError that names the lane and its ranks
    if they cannot be connected.
    """
    everyone = ranks or range(backend.grid.world_size)
    if len(everyone) == 1:
        return
    with _naming("the world", everyone):
        backend.gather_world(torch.zeros(1, dtype=torch.uint8, device=device))
        lanes.drain()
    for lane in LANES:
        members = backend.grid.members(lane.link, backend.rank)
        if len(members) == 1:
            continue
        send, sent_numel = (backend.all_gather, 1) if lane.direction is Direction.CLIMB else (backend.exchange, len(members))
        received, sent = (torch.zeros(numel, dtype=torch.uint8, device=device) for numel in (len(members), sent_numel))
        with _naming(f"lane {lane}", [everyone[member] for member in members]):
            lanes.submit(Hop("first message", lane, partial(send, lane, received, sent), nothing))
            lanes.drain()
    for lane in ACROSS_LANES:
        if backend.grid.link_ranks(lane.link) > 1:
            _send_across(lane, backend, lanes, device, everyone)


def _send_across(lane: Lane, backend: Backend, lanes: Lanes, device: torch.device, ranks: Sequence[int]) -> None:
    members = backend.grid.members(lane.link, backend.rank)
    received, sent = (torch.zeros(len(members), dtype=torch.uint8, device=device) for _ in range(2))
    with _naming(f"the {lane.link.value} link", [ranks[member] for member in members]):
        gathering = backend.all_gather(lane, received, sent[:1]) if lane == TENSOR_ACROSS else None
        for work in (gathering, backend.exchange(lane, received, sent)):
            if work is not None:
                work.wait()
        lanes.drain()


@contextmanager
def _naming(what: str, ranks: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{what}: {ranks_in_words(ranks)} could not exchange a first message; NCCL_DEBUG=INFO in the environment of every rank makes "
            f"NCCL say which interfaces it tries, and docs/launching.md has the variables that choose others: {error}"
        ) from error
