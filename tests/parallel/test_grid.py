from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.parallel import grid as grid_module
from megatron_zpp.parallel.grid import Grid, Peers
from megatron_zpp.parallel.topology import LADDER_LINKS, Link, Topology
from megatron_zpp.system.user_error import UserError


@st.composite
def drawn_grids(draw: st.DrawFn) -> Grid:
    nodes, partitions, partition, tensor_ranks = (draw(st.integers(1, most)) for most in (4, 3, 4, 4))
    of_node = partitions * partition
    context_ranks = draw(st.sampled_from([c for c in range(1, nodes * of_node + 1) if are_alike(c, nodes, of_node)]))
    return Grid(nodes * of_node * tensor_ranks, of_node * tensor_ranks, partition, tensor_ranks, context_ranks)


def are_alike(context_ranks: int, nodes: int, of_node: int) -> bool:
    """Whether groups of so many consecutive ranks cut all nodes alike."""
    shared = [{rank // context_ranks for rank in range(node * of_node, (node + 1) * of_node)} for node in range(nodes)]
    parts_of_node = all(of_node // len(groups) == context_ranks and of_node % context_ranks == 0 for groups in shared)
    whole_nodes = all(len(groups) == 1 for groups in shared) and nodes * of_node % context_ranks == 0
    return parts_of_node or (whole_nodes and context_ranks % of_node == 0)


grids = drawn_grids()


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
def test_the_context_link_joins_neighbours_in_one_ladder_that_share_samples_in_the_order_of_their_tokens(grid: Grid) -> None:
    for group in grid.groups(Link.CONTEXT):
        assert len({(grid.sample_group_of(rank), grid.tensor_rank_of(rank)) for rank in group}) == 1
        assert [grid.context_rank_of(rank) for rank in group] == list(range(grid.context_ranks))
        data_ranks = [grid.data_rank_of(rank) for rank in group]
        assert data_ranks == list(range(data_ranks[0], data_ranks[0] + grid.context_ranks))
    assert {grid.sample_group_of(rank) for rank in range(grid.world_size)} == set(range(grid.sample_groups))


@given(grids)
def test_every_rank_has_as_many_peers_with_its_samples_on_its_node(grid: Grid) -> None:
    peers = {sum(grid.share_node(rank, other) for other in grid.members(Link.CONTEXT, rank)) for rank in range(grid.world_size)}
    assert len(peers) == 1 and grid.link_ranks(Link.CONTEXT) == grid.context_ranks


@given(grids)
def test_a_ladder_does_not_depend_on_who_shares_samples(grid: Grid) -> None:
    assert grid.ladder == Grid(grid.world_size, grid.ranks_per_node, grid.partition_ranks, grid.tensor_ranks).ladder


@given(grids)
def test_two_ranks_share_exactly_one_link_of_weights_and_activations_at_most(grid: Grid) -> None:
    for rank in range(grid.world_size):
        others = [other for link in (*LADDER_LINKS, Link.TENSOR) for other in grid.members(link, rank) if other != rank]
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
    assert Grid.of_nodes(2, 4, 2, context_ranks=2).groups(Link.CONTEXT) == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_a_link_between_partitions_may_stay_in_a_node_and_a_node_takes_in_what_all_its_ranks_do() -> None:
    grid = Grid(world_size=8, ranks_per_node=4, partition_ranks=2)
    assert grid.nodes == 2
    assert grid.into_node(10) == 40
    assert grid.members(Link.INTER, 5) == (1, 3, 5, 7)
    assert [grid.share_node(5, other) for other in (1, 3, 5, 7)] == [False, False, True, True]
    assert grid.peers(Link.INTER, 5) == Peers(local=1, remote=2)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ((6, 4, 1), "--ranks-per-node 4 does not divide the world size 6; choose 1, 2, 3 or 6"),
        ((12, 6, 1, 4), "--tensor-model-parallel-size 4 does not divide the 6 ranks of a node"),
        ((12, 6, 1, 4), "must share a node; choose 1, 2, 3 or 6"),
        ((12, 5, 3), "--ranks-per-node 5 does not divide the world size 12; choose 3, 6 or 12"),
        ((12, 5, 3, 2), "--ranks-per-node 5 does not divide the world size 12; choose 6 or 12"),
        ((10, 4, 3), "--ranks-per-node 4 does not divide the world size 10; choose 1, 2, 5 or 10"),  # no size is good for partitions of 3
        ((12, 6, 3, 4), "must share a node; choose 1 or 2"),
        ((12, 6, 1, 4, 4), "must share a node; choose 3"),
        ((12, 6, 4), "--zero-hpz-partition-size 4 does not divide the 6 ranks of a node; choose 1, 2, 3 or 6"),
        ((16, 8, 8, 2), "--zero-hpz-partition-size 8 does not divide the 4 ranks of a node that are in one ladder"),
        ((16, 8, 8, 2), "(--tensor-model-parallel-size 2); choose 1, 2 or 4"),
        ((12, 6, 6, 1, 5), "--context-parallel-size 5 does not divide the 12 data-parallel ranks into groups"),
        ((12, 6, 6, 1, 4), "whole nodes or equal parts of one, and a node has 6 of these ranks; choose 1, 2, 3, 6 or 12"),
        ((12, 6, 3, 2, 2), "and a node has 3 of these ranks; choose 1, 3 or 6"),
        ((0, 1, 1), "positive"),
        ((2, 2, 2, 1, 0), "positive"),
        ((2, 0, 1), "positive"),
        ((2, 2, -1), "positive"),
        ((2, 2, 1, 0), "positive"),
    ],
)
def test_sizes_that_make_no_grid_are_refused_with_flag_value_rule_and_remedy(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        Grid(*sizes)
