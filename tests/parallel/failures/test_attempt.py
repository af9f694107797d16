"""Starts that share a store do not see each other's keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_zpp.parallel.failures.attempt import own_part

SOON, LATER = timedelta(seconds=0.2), timedelta(seconds=60)


def start(store: dist.Store, world_size: int) -> list[dist.Store]:
    """The part of the store that each rank of a start has found, in rank order; rank 0 starts last."""
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(lambda rank: own_part(store, rank, world_size, LATER), range(world_size)[::-1]))[::-1]


@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_ranks_of_one_start_share_a_part_and_those_of_another_have_one_of_their_own(world_size: int) -> None:
    store = dist.HashStore()
    for number in range(3):
        parts = start(store, world_size)
        assert not parts[-1].check(["key"])
        parts[0].set("key", str(number))
        assert [part.get("key") for part in parts] == [str(number).encode()] * world_size


def test_a_start_that_never_came_together_does_not_disturb_the_next() -> None:
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="rank 0 has waited 0:00:00.200000 for rank 1, 2 of 3 to join the run"):
        own_part(store, 0, 3, SOON)
    with pytest.raises(RuntimeError, match="rank 2 has waited 0:00:00.200000 for rank 0 to join the run"):
        own_part(store, 2, 3, SOON)
    parts = start(store, 3)
    parts[0].set("key", "new")
    assert parts[2].get("key") == b"new"
