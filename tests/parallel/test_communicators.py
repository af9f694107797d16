"""How much of a GPU NCCL may take: processors and memory."""

from __future__ import annotations

import pytest

from megatron_zpp.parallel.communicators import MEBIBYTE, Communicator, communicators, lane_ctas
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import CONTEXT_ACROSS, LANES, TENSOR_ACROSS

A100_PROCESSORS = 108  # the fewest of a GPU of its kind


GRIDS = [
    Grid.of_nodes(2, 4),
    Grid.of_nodes(2, 8, 2),
    Grid.of_nodes(2, 8, 8),
    Grid.of_nodes(1, 8, 4),
    Grid.of_nodes(2, 8, 1, 4),
    Grid.of_nodes(2, 8, 2, 4),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_kernels_of_all_communicators_fit_together_and_leave_half_of_an_a100_to_computation(grid: Grid) -> None:
    assert sum(one.ctas for one in communicators(grid)) <= A100_PROCESSORS / 2


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_limits_are_powers_of_two_because_nccl_rounds_the_channels_of_an_exchange_up(grid: Grid) -> None:
    assert all(one.ctas & (one.ctas - 1) == 0 for one in communicators(grid))


def test_computation_waits_most_for_the_tensor_link_so_it_has_the_ctas_that_climbs_have_without_one() -> None:
    links, grid = Grid.of_nodes(2, 8), Grid.of_nodes(2, 8, 2)
    assert lane_ctas(grid, TENSOR_ACROSS) == max(lane_ctas(links, lane) for lane in LANES) > max(lane_ctas(grid, lane) for lane in LANES)


@pytest.mark.parametrize(
    ("grid", "peers"),
    [
        (Grid.of_nodes(1, 1), []),
        (Grid.of_nodes(1, 4), [(3, 0)] * 2 + [(3, 0)]),
        (Grid.of_nodes(4, 1), [(0, 3)] * 2 + [(0, 3)]),
        (Grid.of_nodes(4, 8), [(0, 3), (7, 0)] * 2 + [(7, 0), (0, 3)]),
        (Grid(32, 8, 4), [(1, 6), (3, 0)] * 2 + [(7, 0), (0, 3)]),  # two partitions on each node
    ],
    ids=str,
)
def test_a_rank_has_a_communicator_for_each_lane_with_company_and_for_the_world_one_inside_and_one_between_nodes(
    grid: Grid, peers: list[tuple[int, int]]
) -> None:
    found = communicators(grid)
    assert [(one.local_peers, one.remote_peers) for one in found] == peers
    kinds = [(one.gathers, one.exchanges) for one in found]
    links = min(2, len(found) // 2)
    assert kinds == [(True, False)] * links + [(False, True)] * links + [(True, False)] * (len(found) - 2 * links)


def test_the_tensor_link_adds_one_communicator_that_gathers_and_exchanges_inside_the_node() -> None:
    *of_lanes, across, _, _ = communicators(Grid.of_nodes(2, 8, 4))
    assert (across.local_peers, across.remote_peers, across.gathers, across.exchanges) == (3, 0, True, True)
    assert [(one.local_peers, one.remote_peers) for one in of_lanes] == [(0, 1), (1, 0)] * 2


def test_the_context_link_adds_one_communicator_that_exchanges_inside_the_node_or_between_nodes() -> None:
    found = [communicators(Grid.of_nodes(2, 8, 2, ranks))[-3] for ranks in (2, 8)]
    assert [(one.local_peers, one.remote_peers, one.gathers, one.exchanges) for one in found] == [(1, 0, False, True), (3, 4, False, True)]


def test_without_a_tensor_link_computation_waits_most_for_the_context_link() -> None:
    assert lane_ctas(Grid.of_nodes(2, 8, 1, 4), CONTEXT_ACROSS) == lane_ctas(Grid.of_nodes(2, 8, 2), TENSOR_ACROSS)


def test_a_ring_inside_a_node_takes_the_buffers_of_one_peer_and_an_exchange_those_of_every_peer() -> None:
    """Of each channel: 10 MiB to receive in three protocols, 2 MiB of flags; gathers by NVLink SHARP 2 MiB for each member."""
    ring, exchange = 16 * (12 + 8 * 2) * MEBIBYTE, 16 * 7 * 12 * MEBIBYTE
    assert Communicator(7, 0, 16, exchanges=False, gathers=True).buffer_bytes() == ring
    assert Communicator(7, 0, 16, exchanges=True, gathers=False).buffer_bytes() == exchange
    assert Communicator(7, 0, 16, exchanges=True, gathers=True).buffer_bytes() == ring + exchange


def test_over_the_network_an_exchange_with_a_thousand_nodes_takes_the_buffers_of_one_with_two() -> None:
    few, many = (Communicator(0, nodes - 1, 8, exchanges=True, gathers=False).buffer_bytes() for nodes in (2, 1000))
    assert few == many == 8 * 2 * 2 * MEBIBYTE
    assert Communicator(0, 3, 8, exchanges=False, gathers=True).buffer_bytes() == 8 * 2 * 10 * MEBIBYTE


def test_half_the_ctas_take_half_the_buffers() -> None:
    one, two = (Communicator(3, 4, ctas, exchanges=True, gathers=True).buffer_bytes() for ctas in (4, 8))
    assert two == 2 * one
