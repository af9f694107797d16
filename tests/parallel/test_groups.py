from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import make_lane_groups
from megatron_zpp.parallel.topology import LANES, Link

TIMEOUT = timedelta(minutes=3)


def _record_new_groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], timedelta]]:
    calls: list[tuple[list[int], timedelta]] = []

    def new_group(ranks: list[int], timeout: timedelta) -> Any:
        calls.append((ranks, timeout))
        return len(calls)

    monkeypatch.setattr(dist, "new_group", new_group)
    return calls


@pytest.mark.parametrize(
    "grid", [*(Grid.of_nodes(*sizes) for sizes in [(2, 2), (3, 2), (1, 4), (4, 1), (2, 4, 2), (2, 3, 3)]), Grid(8, 8, 2, 2)], ids=str
)
def test_every_rank_makes_the_same_groups_in_the_same_order_with_the_timeout_asked_for(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _record_new_groups(monkeypatch)
    lists = []
    for rank in range(grid.world_size):
        calls.clear()
        make_lane_groups(grid, rank, TIMEOUT)
        lists.append(list(calls))
    assert all(made == lists[0] for made in lists)
    assert {timeout for _, timeout in lists[0]} == {TIMEOUT}


@pytest.mark.parametrize("grid", [Grid.of_nodes(3, 2), Grid.of_nodes(2, 6, 3)], ids=str)
def test_every_lane_of_a_link_with_company_has_a_group_of_its_own(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _record_new_groups(monkeypatch)
    own = make_lane_groups(grid, 3, TIMEOUT)
    assert set(own) == set(LANES)
    made: list[int] = [int(str(group)) for group in own.values()]
    assert len(set(made)) == len(LANES)
    assert all(tuple(calls[group - 1][0]) == grid.members(lane.link, 3) for lane, group in zip(own, made, strict=True))


def test_a_link_of_one_rank_has_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    _record_new_groups(monkeypatch)
    assert {lane.link for lane in make_lane_groups(Grid.of_nodes(1, 2), 0, TIMEOUT)} == {Link.INTRA}
