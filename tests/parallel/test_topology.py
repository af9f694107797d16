from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.parallel import topology as topology_module
from megatron_zpp.parallel.topology import LADDER_LINKS, Link, Topology, check_placement
from megatron_zpp.system.user_error import UserError

worlds = st.builds(
    lambda nodes, partitions, partition: Topology(nodes * partitions * partition, partitions * partition, partition),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 6),
)


@given(worlds)
def test_every_slice_has_exactly_one_owner(topology: Topology) -> None:
    assert sorted(map(topology.slice_of, range(topology.data_ranks))) == list(range(topology.data_ranks))


@given(worlds)
def test_a_secondary_rung_is_the_contiguous_run_of_slices_that_the_inter_link_delivers_in_order(topology: Topology) -> None:
    for rank in range(topology.data_ranks):
        delivered = [topology.slice_of(member) for member in topology.members(Link.INTER, rank)]
        assert delivered == list(range(delivered[0], delivered[0] + topology.partitions))
        assert delivered[topology.partition_of(rank)] == topology.slice_of(rank)


@given(worlds)
def test_the_intra_link_delivers_the_secondary_rungs_of_a_partition_as_all_slices_in_order(topology: Topology) -> None:
    for rank in range(topology.data_ranks):
        members = topology.members(Link.INTRA, rank)
        rungs = [sorted(map(topology.slice_of, topology.members(Link.INTER, member))) for member in members]
        assert [index for rung in rungs for index in rung] == list(range(topology.data_ranks))


@given(worlds)
def test_the_members_of_a_link_agree_on_who_they_are_and_are_as_many_as_the_link_has(topology: Topology) -> None:
    for link in LADDER_LINKS:
        for rank in range(topology.data_ranks):
            members = topology.members(link, rank)
            assert all(topology.members(link, member) == members for member in members)
            assert len(members) == topology.link_ranks(link)


@given(worlds)
def test_two_ranks_share_exactly_one_link_at_most(topology: Topology) -> None:
    for rank in range(topology.data_ranks):
        both = set(topology.members(Link.INTER, rank)) & set(topology.members(Link.INTRA, rank))
        assert both == {rank}


def test_the_picture_at_the_top_of_the_file_is_true() -> None:
    rows = [line for line in (topology_module.__doc__ or "").splitlines() if "partition n =" in line]
    topology = Topology.of_nodes(2, 3)
    for partition, row in enumerate(rows):
        drawn = [(int(rank), int(piece)) for rank, piece in re.findall(r"rank (\d+) \[(\d+)\]", row)]
        ranks = [partition * 3 + place for place in range(3)]
        assert drawn == [(rank, topology.slice_of(rank)) for rank in ranks]
        assert topology.members(Link.INTRA, ranks[0]) == tuple(ranks)
    assert len(rows) == 2
    assert topology.members(Link.INTER, 1) == (1, 4)


def test_a_partition_may_be_a_part_of_a_node() -> None:
    topology = Topology(data_ranks=8, ranks_per_node=4, partition_ranks=2)
    assert topology.partitions == 4
    assert [topology.partition_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert topology.members(Link.INTER, 5) == (1, 3, 5, 7)


def test_a_ladder_has_no_tensor_link() -> None:
    topology = Topology.of_nodes(2, 2)
    with pytest.raises(RuntimeError, match="TENSOR is not a link of a ladder"):
        topology.members(Link.TENSOR, 0)
    with pytest.raises(RuntimeError, match="TENSOR is not a link of a ladder"):
        topology.link_ranks(Link.TENSOR)


def test_a_node_size_that_does_not_divide_the_world_is_refused_with_flag_value_and_remedy() -> None:
    with pytest.raises(UserError, match=r"--ranks-per-node 4 does not divide the 6 data ranks; choose 1, 2, 3 or 6"):
        Topology(data_ranks=6, ranks_per_node=4, partition_ranks=1)


def test_a_partition_that_does_not_divide_the_node_is_refused_with_value_and_remedy() -> None:
    with pytest.raises(UserError, match=r"partition of 4 ranks does not divide the 6 ranks of a node; choose 1, 2, 3 or 6"):
        Topology(data_ranks=12, ranks_per_node=6, partition_ranks=4)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 0, 1), (2, 2, -1)])
def test_a_size_below_one_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(UserError, match="positive"):
        Topology(*sizes)


@pytest.mark.parametrize("hosts", [["a"] * 4, ["a", "a", "b", "b"], ["b", "b", "a", "a"]])
def test_nodes_of_consecutive_ranks_on_one_host_are_accepted_also_several_on_the_same(hosts: list[str]) -> None:
    check_placement(hosts, ranks_per_node=2)


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "a", "a", "b"]])
def test_a_node_spread_over_hosts_is_refused_naming_ranks_hosts_and_remedy(hosts: list[str]) -> None:
    with pytest.raises(
        ValueError, match=r"ranks \d to \d form one node \(--ranks-per-node 2\).*a, b; start the ranks of a node consecutively"
    ):
        check_placement(hosts, ranks_per_node=2)
