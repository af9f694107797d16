from __future__ import annotations

import pytest

from megatron_zpp.comm.ledger import Category, Ledger, Traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Link

GRIDS = [
    Grid.of_nodes(1, 1),
    Grid.of_nodes(3, 2),
    Grid(8, 4, 2),
    Grid(12, 4, 1),
    Grid(8, 4, 1, 2),
    Grid(12, 6, 2, 3),
    Grid(16, 8, 2, 2, 2),
    Grid(16, 4, 2, 2, 8),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("link", list(Link))
def test_the_bytes_that_enter_the_nodes_are_counted_message_by_message(grid: Grid, link: Link) -> None:
    entering = [0] * (grid.world_size // grid.ranks_per_node)
    within = 0
    for receiver in range(grid.world_size):
        for sender in grid.members(link, receiver):
            node, sending_node = receiver // grid.ranks_per_node, sender // grid.ranks_per_node
            entering[node] += 100 * (node != sending_node)
            within += 100 * (node == sending_node and sender != receiver)
    for rank in range(grid.world_size):
        ledger = Ledger(grid, rank)
        traffic = ledger.measure(link, 100)
        of_ladder, of_context = ledger.inter_node_bytes(traffic), ledger.context_inter_node_bytes(traffic)
        assert (of_context if link is Link.CONTEXT else of_ladder) == of_ladder + of_context == entering[rank // grid.ranks_per_node]
        counted = {
            Link.TENSOR: traffic.tensor_bytes,
            Link.CONTEXT: traffic.context_bytes - traffic.context_inter_bytes,
            Link.INTER: traffic.intra_bytes,
            Link.INTRA: traffic.intra_bytes,
        }
        assert counted.pop(link) * grid.world_size == within
        assert within == 0 or sum(counted.values()) in (0, traffic.intra_bytes)


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_of_a_gather_of_the_world_a_rank_counts_its_part_of_what_its_node_receives(tensor_ranks: int) -> None:
    traffic = Ledger(Grid.of_nodes(3, 2, tensor_ranks), 4).measure_world(10)
    assert traffic == Traffic(inter_bytes=20, intra_bytes=40)  # of the node 40 from others; inside 2 x 10, and 60 given to the second rank


def test_ladders_beside_each_other_multiply_what_enters_a_node() -> None:
    one, two = Ledger(Grid.of_nodes(2, 2), 0), Ledger(Grid.of_nodes(2, 4, tensor_ranks=2), 0)
    traffic = one.measure(Link.INTER, 10)
    assert two.measure(Link.INTER, 10) == traffic == Traffic(inter_bytes=10)
    assert two.inter_node_bytes(traffic) == 2 * one.inter_node_bytes(traffic) == 40


def test_measuring_books_nothing_and_categories_are_kept_apart() -> None:
    ledger = Ledger(Grid.of_nodes(2, 2), 0)
    traffic = ledger.measure(Link.INTER, 7)
    assert ledger.total(*Category) == Traffic()
    ledger.book(Category.WEIGHTS, traffic)
    ledger.book(Category.EVALUATION, Traffic(1, 2))
    ledger.book(Category.WEIGHTS, traffic)
    assert ledger.total(Category.WEIGHTS) == Traffic(14, 0)
    assert ledger.total(Category.WEIGHTS, Category.EVALUATION) == Traffic(15, 2)
    assert ledger.total(Category.WEIGHTS, Category.EVALUATION) - ledger.total(Category.WEIGHTS) == Traffic(1, 2)


def test_the_accounts_of_two_ranks_are_their_own() -> None:
    ledgers = [Ledger(Grid.of_nodes(1, 2), rank) for rank in range(2)]
    ledgers[0].book(Category.CONTROL, Traffic(3, 3))
    assert ledgers[1].total(Category.CONTROL) == Traffic()
