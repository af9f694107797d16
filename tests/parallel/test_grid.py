from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.parallel import grid as grid_module
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import LADDER_LINKS, Link, Topology

grids = st.builds(
    lambda nodes, partitions, partition, tensor_ranks: Grid(
        nodes * partitions * partition * tensor_ranks, partitions * partition * tensor_ranks, partition, tensor_ranks
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
)


@given(grids)
def test_every_place_of_every_ladder_is_one_rank(grid: Grid) -> None:
    ranks = [grid.rank_of(data_rank, ladder) for data_rank in range(grid.data_ranks) for ladder in range(grid.tensor_ranks)]
    assert ranks == list(range(grid.world_size))
    assert [grid.rank_of(grid.data_rank_of(rank), grid.tensor_rank_of(rank)) for rank in ranks] == ranks


@given(grids)
def test_the_groups_of_each_link_partition_the_world_and_agree_with_the_members(grid: Grid) -> None:
    for link in Link:
        groups = grid.groups(link)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
        assert all(grid.members(link, rank) == group for group in groups for rank in group)
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@given(grids)
def test_the_links_of_a_ladder_join_its_ranks_alone_in_the_order_of_their_slices(grid: Grid) -> None:
    for link in LADDER_LINKS:
        for rank in range(grid.world_size):
            members = grid.members(link, rank)
            assert {grid.tensor_rank_of(member) for member in members} == {grid.tensor_rank_of(rank)}
            slices = [grid.ladder.slice_of(grid.data_rank_of(member)) for member in members]
            assert slices == sorted(slices)
            assert len(members) == grid.ladder.link_ranks(link)


@given(grids)
def test_the_tensor_link_joins_consecutive_ranks_of_one_node_and_of_equal_data_rank(grid: Grid) -> None:
    for group in grid.groups(Link.TENSOR):
        assert group == tuple(range(group[0], group[0] + grid.tensor_ranks))
        assert [grid.tensor_rank_of(rank) for rank in group] == list(range(grid.tensor_ranks))
        assert len({grid.data_rank_of(rank) for rank in group}) == 1
        assert all(grid.share_node(group[0], rank) for rank in group)


@given(grids)
def test_two_ranks_share_exactly_one_link_at_most(grid: Grid) -> None:
    for rank in range(grid.world_size):
        others = [other for link in Link for other in grid.members(link, rank) if other != rank]
        assert len(others) == len(set(others))


@given(grids)
def test_the_intra_link_never_leaves_the_node(grid: Grid) -> None:
    assert all(grid.share_node(rank, member) for rank in range(grid.world_size) for member in grid.members(Link.INTRA, rank))


@given(grids)
def test_one_tensor_rank_makes_one_ladder_of_all_ranks(grid: Grid) -> None:
    alone, ladder = Grid(*vars(grid.ladder).values()), grid.ladder
    assert alone.ladder == ladder == Topology(ladder.data_ranks, ladder.ranks_per_node, ladder.partition_ranks)
    assert (alone.world_size, alone.nodes) == (ladder.data_ranks, grid.nodes)
    for rank in range(alone.world_size):
        assert (alone.data_rank_of(rank), alone.tensor_rank_of(rank)) == (rank, 0)
        assert all(alone.members(link, rank) == ladder.members(link, rank) for link in LADDER_LINKS)
        assert alone.members(Link.TENSOR, rank) == (rank,)


def test_the_picture_at_the_top_of_the_file_is_true() -> None:
    rows = [line for line in (grid_module.__doc__ or "").splitlines() if re.search(r"data rank \d +rank", line)]
    grid = Grid.of_nodes(2, 4, tensor_ranks=2)
    drawn = [tuple(map(int, re.findall(r"rank (\d)", row))) for row in rows]
    assert drawn == [(data_rank, *grid.members(Link.TENSOR, grid.rank_of(data_rank, 0))) for data_rank in range(4)]
    assert grid.ladder == Topology.of_nodes(2, 2)


def test_a_link_between_partitions_may_stay_in_a_node_and_a_node_takes_in_what_all_its_ranks_do() -> None:
    grid = Grid(world_size=8, ranks_per_node=4, partition_ranks=2)
    assert grid.nodes == 2
    assert grid.into_node(10) == 40
    assert grid.members(Link.INTER, 5) == (1, 3, 5, 7)
    assert [grid.share_node(5, other) for other in (1, 3, 5, 7)] == [False, False, True, True]


@pytest.mark.parametrize(
    "sizes, words",
    [
        ((6, 4, 1), "--ranks-per-node 4 does not divide the world size 6; choose 1, 2, 3 or 6"),
        ((12, 6, 1, 4), "--tensor-model-parallel-size 4 does not divide the 6 ranks of a node"),
        ((12, 6, 1, 4), "must share a node; choose 1, 2, 3 or 6"),
        ((12, 6, 4), "--zero-hpz-partition-size 4 does not divide the 6 ranks of a node; choose 1, 2, 3 or 6"),
        ((16, 8, 8, 2), "--zero-hpz-partition-size 8 does not divide the 4 ranks of a node that are in one ladder"),
        ((16, 8, 8, 2), "(--tensor-model-parallel-size 2); choose 1, 2 or 4"),
        ((0, 1, 1), "positive"),
        ((2, 0, 1), "positive"),
        ((2, 2, -1), "positive"),
        ((2, 2, 1, 0), "positive"),
    ],
)
def test_sizes_that_make_no_grid_are_refused_with_flag_value_rule_and_remedy(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Grid(*sizes)
