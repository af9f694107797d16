from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.fake_nccl import give_torch_nccl
from harness.rank_pool import RankPool

from megatron_zpp.parallel import groups
from megatron_zpp.parallel.communicators import WORLD_CTAS, lane_ctas
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import (
    RECORD_MILLISECONDS,
    RECORD_VARIABLE,
    make_lane_groups,
    make_text_groups,
    make_world_groups,
    nccl_backend,
    shorten_records,
    world_options,
)
from megatron_zpp.parallel.initialize import FAREWELL, World
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.parallel.topology import CONTEXT_ACROSS, LANES, TENSOR_ACROSS, Link

TIMEOUT = timedelta(minutes=3)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GRIDS = [
    *(Grid.of_nodes(*sizes) for sizes in [(2, 2), (3, 2), (1, 4), (4, 1), (2, 4, 2), (2, 3, 3)]),
    Grid(8, 8, 2, 2),
    Grid(8, 4, 2, 2, 2),
]


@dataclass
class NewGroup:
    """A call of torch.distributed.new_group."""

    ranks: list[int]
    timeout: timedelta
    others: dict[str, Any] = field(default_factory=dict)


def _record_new_groups(monkeypatch: pytest.MonkeyPatch) -> list[NewGroup]:
    calls: list[NewGroup] = []

    def new_group(ranks: list[int], timeout: timedelta, **others: Any) -> Any:
        calls.append(NewGroup(ranks, timeout, others))
        return len(calls)

    monkeypatch.setattr(dist, "new_group", new_group)
    give_torch_nccl(monkeypatch)
    return calls


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_rank_makes_the_same_groups_in_the_same_order_with_the_timeout_asked_for(
    grid: Grid, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _record_new_groups(monkeypatch)
    lists = []
    for rank in range(grid.world_size):
        calls.clear()
        make_lane_groups(grid, rank, TIMEOUT, device)
        lists.append(list(calls))
    assert all(made == lists[0] for made in lists)
    assert {call.timeout for call in lists[0]} == {TIMEOUT}


@pytest.mark.parametrize(
    "grid", [Grid.of_nodes(3, 2), Grid.of_nodes(2, 6, 3), Grid.of_nodes(2, 4, 1, 8), Grid.of_nodes(2, 8, 2, 2)], ids=str
)
def test_every_lane_of_a_link_with_company_has_a_group_of_its_own(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _record_new_groups(monkeypatch)
    own = make_lane_groups(grid, 3, TIMEOUT, CPU)
    across = {TENSOR_ACROSS: grid.tensor_ranks, CONTEXT_ACROSS: grid.context_ranks}
    assert set(own) == {*LANES, *(lane for lane, ranks in across.items() if ranks > 1)}
    made: list[int] = [int(str(group)) for group in own.values()]
    assert len(set(made)) == len(own)
    assert all(tuple(calls[group - 1].ranks) == grid.members(lane.link, 3) for lane, group in zip(own, made, strict=True))


def test_worlds_that_are_arranged_alike_have_groups_of_their_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, worlds = _record_new_groups(monkeypatch), [[0, 2, 4, 6], [1, 3, 5, 7]]
    for rank in range(8):
        calls.clear()
        own = make_lane_groups(Grid.of_nodes(2, 2), rank, TIMEOUT, CPU, worlds=worlds)
        assert [call.ranks for call in calls] == 2 * [[0, 4], [2, 6], [1, 5], [3, 7], [0, 2], [4, 6], [1, 3], [5, 7]]
        world = worlds[rank % 2]
        for lane, group in own.items():
            assert calls[int(str(group)) - 1].ranks == [world[place] for place in Grid.of_nodes(2, 2).members(lane.link, world.index(rank))]


ISLANDS = [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
@pytest.mark.parametrize(
    ("grid", "worlds", "expected"),
    [
        (Grid.of_nodes(1, 8), [range(8)], []),  # torch has one of all ranks
        (Grid.of_nodes(8, 1), [range(8)], []),
        (Grid.of_nodes(2, 4), [range(8)], [[0, 1, 2, 3], [4, 5, 6, 7], [0, 4]]),
        (Grid.of_nodes(1, 4), ISLANDS, ISLANDS),
        (Grid.of_nodes(4, 1), ISLANDS, ISLANDS),
        (Grid.of_nodes(2, 2), ISLANDS, [[0, 2], [4, 6], [1, 3], [5, 7], [0, 4], [1, 5]]),
    ],
    ids=str,
)
def test_numbers_are_gathered_in_one_group_per_node_and_one_of_first_ranks_or_in_one_if_no_two_ranks_share_a_node_or_all_do(
    grid: Grid, worlds: list[list[int]], expected: list[list[int]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _record_new_groups(monkeypatch)
    for rank in range(8):
        calls.clear()
        made = make_world_groups(grid, worlds, rank, TIMEOUT, device)
        assert [call.ranks for call in calls] == expected
        assert {call.others["backend"] for call in calls} <= {nccl_backend() if device == GPU else None}
        own = [calls[int(str(group)) - 1].ranks for group in made.made()]
        assert own == [ranks for ranks in expected if rank in ranks]
        assert (made.node is not None) == (len(expected) in (3, 6)) and made.nodes == (2 if made.node is not None else 1)


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [
        (1, [[0]]),
        (3, [[0, 1, 2]]),
        (4, [[0, 1], [2, 3], [0, 2]]),
        (8, [[0, 1], [2, 3], [4, 5], [6, 7], [0, 2, 4, 6]]),
        (9, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6]]),
        (13, [[*range(13)]]),
    ],
)
def test_texts_are_gathered_in_groups_of_gloo_of_neighbours_and_of_the_first_of_these(
    world_size: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _record_new_groups(monkeypatch)
    monkeypatch.setattr(groups, "_torch_has_gloo", lambda: False)
    for rank in range(world_size):
        calls.clear()
        made = make_text_groups(world_size, rank, TIMEOUT)
        assert [call.ranks for call in calls] == expected
        assert all(call.others == {"backend": "gloo"} and call.timeout == TIMEOUT for call in calls)
        assert [calls[int(str(group)) - 1].ranks for group in made.made()] == [ranks for ranks in expected if rank in ranks]


@pytest.mark.parametrize("world_size", [64, 4096, 16384])
def test_a_rank_has_few_others_in_its_groups_for_texts(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _record_new_groups(monkeypatch)
    monkeypatch.setattr(groups, "_torch_has_gloo", lambda: False)
    made = make_text_groups(world_size, 0, TIMEOUT)
    assert [len(calls[int(str(group)) - 1].ranks) for group in made.made()] == [world_size**0.5] * 2


def test_a_link_of_one_rank_has_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    _record_new_groups(monkeypatch)
    assert {lane.link for lane in make_lane_groups(Grid.of_nodes(1, 2), 0, TIMEOUT, CPU)} == {Link.INTRA}


def test_on_a_cpu_torch_chooses_the_backend_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _record_new_groups(monkeypatch)
    make_lane_groups(Grid.of_nodes(2, 2), 0, TIMEOUT, CPU)
    assert [call.others for call in calls] == [{}] * len(calls)
    assert world_options(TIMEOUT, CPU) is None


@pytest.mark.parametrize("grid", [Grid.of_nodes(2, 2), Grid.of_nodes(2, 4, 2)], ids=str)
def test_on_a_gpu_a_lane_has_nccl_alone_with_the_limit_of_its_link_and_its_name_in_nccls_log(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _record_new_groups(monkeypatch)
    own = make_lane_groups(grid, 0, TIMEOUT, GPU)
    assert {call.others["backend"] for call in calls} == {nccl_backend()}
    for lane, group in own.items():
        call = calls[int(str(group)) - 1]
        assert call.others["group_desc"] == f"lane {lane}"
        assert call.others["pg_options"].config.max_ctas == lane_ctas(grid, lane)
        assert call.others["pg_options"].is_high_priority_stream


def test_torch_may_change_the_options_of_one_group_without_changing_another_and_has_no_timeout_to_warn_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = _record_new_groups(monkeypatch)
    make_lane_groups(Grid.of_nodes(2, 2), 0, TIMEOUT, GPU)
    options = [call.others["pg_options"] for call in calls]
    assert len({id(some) for some in options}) == len(calls)
    assert {some._timeout for some in options} == {TIMEOUT}


def test_the_world_shortens_records_and_its_group_has_the_limit_of_small_messages_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    class ConnectedError(Exception):
        pass

    def init_process_group(backend: str, **arguments: Any) -> None:
        made.update(arguments, backend=backend)
        raise ConnectedError

    give_torch_nccl(monkeypatch)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv(RECORD_VARIABLE, "restored afterwards")
    monkeypatch.delenv(RECORD_VARIABLE)
    with pytest.raises(ConnectedError):
        World(Launch(0, 1, 0, 1), GPU, timedelta(minutes=1))
    assert os.environ[RECORD_VARIABLE] == str(RECORD_MILLISECONDS)
    assert made["backend"] == nccl_backend()
    assert made["pg_options"].config.max_ctas == WORLD_CTAS
    assert made["pg_options"]._timeout == made["timeout"]


@pytest.mark.parametrize(("chosen", "expected"), [(None, RECORD_MILLISECONDS), ("15000", 15000)])
def test_the_wait_of_torch_after_a_failed_collective_is_part_of_the_farewell_unless_the_user_chooses_another(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: int
) -> None:
    monkeypatch.setenv(RECORD_VARIABLE, "restored afterwards")
    monkeypatch.setenv(RECORD_VARIABLE, chosen or "")
    if chosen is None:
        monkeypatch.delenv(RECORD_VARIABLE)
    shorten_records()
    assert os.environ[RECORD_VARIABLE] == str(expected)
    assert timedelta(milliseconds=4 * RECORD_MILLISECONDS) < FAREWELL / 2


@pytest.mark.parametrize(("found", "name"), [([], "nccl"), (["its entry point"], "nccl-legacy")])
def test_where_torch_has_other_groups_under_nccl_those_of_before_are_used(
    monkeypatch: pytest.MonkeyPatch, found: list[str], name: str
) -> None:
    monkeypatch.setattr(groups, "entry_points", lambda **wanted: found if wanted["name"] == "nccl-legacy" else [])
    assert nccl_backend.__wrapped__() == name


def backends_kept_when_groups_are_freed(first_version_without_lock: str) -> tuple[list[int], int]:
    """How many backends are kept at the moment each of three groups is freed, and at the end."""
    groups.GROUPS_END_WITHOUT_LOCK = first_version_without_lock
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ended, left = dist.new_group([0]), dist.new_group([0])
    kept: list[int] = []
    for group in (ended, left, dist.group.WORLD):
        weakref.finalize(group, lambda: kept.append(len(groups._kept_backends)))
    groups.end_group(ended)
    del ended, left, group
    groups.end_world()
    return kept, len(groups._kept_backends)


def test_with_an_old_torch_gloo_s_part_outlives_each_group(ranks: RankPool) -> None:
    assert ranks.run(1, 1, backends_kept_when_groups_are_freed, "99") == [([1, 3, 3], 0)]
    assert ranks.run(1, 1, backends_kept_when_groups_are_freed, "2.6") == [([0, 0, 0], 0)]
