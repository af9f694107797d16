"""How much of a GPU NCCL may take: processors and memory."""

from __future__ import annotations

import pytest

from megatron_zpp.parallel.communicators import MEBIBYTE, WORLD_CTAS, Communicator, communicators, lane_ctas
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import LANES

A100_PROCESSORS = 108  # the fewest of a GPU of its kind


def test_the_kernels_of_all_communicators_fit_together_and_leave_half_of_an_a100_to_computation() -> None:
    assert sum(map(lane_ctas, LANES)) + WORLD_CTAS <= A100_PROCESSORS / 2


def test_limits_are_powers_of_two_because_nccl_rounds_the_channels_of_an_exchange_up() -> None:
    assert all(ctas & (ctas - 1) == 0 for ctas in [*map(lane_ctas, LANES), WORLD_CTAS])


@pytest.mark.parametrize(
    ("grid", "peers"),
    [
        (Grid.of_nodes(1, 1), []),
        (Grid.of_nodes(1, 4), [(3, 0)] * 2 + [(3, 0)]),
        (Grid.of_nodes(4, 1), [(0, 3)] * 2 + [(0, 3)]),
        (Grid.of_nodes(4, 8), [(0, 3), (7, 0)] * 2 + [(7, 24)]),
        (Grid(32, 8, 4), [(1, 6), (3, 0)] * 2 + [(7, 24)]),  # two partitions on each node
    ],
    ids=str,
)
def test_a_rank_has_a_communicator_for_each_lane_with_company_and_one_for_the_world(grid: Grid, peers: list[tuple[int, int]]) -> None:
    found = communicators(grid)
    assert [(one.local_peers, one.remote_peers) for one in found] == peers
    assert [one.exchanges for one in found[:-1]] == [False] * (len(found) // 2) + [True] * (len(found) // 2)
    assert not found or not found[-1].exchanges


def test_a_ring_inside_a_node_takes_the_buffers_of_one_peer_and_an_exchange_those_of_every_peer() -> None:
    """Of each channel: 10 MiB to receive in three protocols, 2 MiB of flags; gathers by NVLink SHARP 2 MiB for each member."""
    assert Communicator(7, 0, 16, exchanges=False).buffer_bytes() == 16 * (12 + 8 * 2) * MEBIBYTE
    assert Communicator(7, 0, 16, exchanges=True).buffer_bytes() == 16 * 7 * 12 * MEBIBYTE


def test_over_the_network_an_exchange_with_a_thousand_nodes_takes_the_buffers_of_one_with_two() -> None:
    few, many = (Communicator(0, nodes - 1, 8, exchanges=True).buffer_bytes() for nodes in (2, 1000))
    assert few == many == 8 * 2 * 2 * MEBIBYTE
    assert Communicator(0, 3, 8, exchanges=False).buffer_bytes() == 8 * 2 * 10 * MEBIBYTE


def test_half_the_ctas_take_half_the_buffers() -> None:
    one, two = (Communicator(3, 4, ctas, exchanges=True).buffer_bytes() for ctas in (4, 8))
    assert two == 2 * one
