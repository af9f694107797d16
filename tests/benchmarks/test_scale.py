"""benchmarks/scale.py: the forms by which its tables go beyond the worlds that were measured."""

from __future__ import annotations

import pytest
from harness.rank_pool import RankPool

from benchmarks.scale_study.control import payload_into_node
from benchmarks.scale_study.groups import RANKS_PER_NODE, measured
from megatron_zpp.parallel.gathers import rounds


def test_the_numbers_of_a_step_of_4096_ranks_are_less_than_a_megabyte_into_a_node() -> None:
    assert payload_into_node(512, 8) == 8 * 6 * (4096 - 8) < 1e6
    assert rounds(512) == 9


@pytest.mark.parametrize("nodes", [2, 8])
def test_all_ranks_make_two_groups_per_node_and_place_for_lanes_and_one_per_node_and_one_for_numbers(nodes: int, ranks: RankPool) -> None:
    found = ranks.run(1, 1, measured, nodes)[0]
    assert (found.ranks, found.made, found.own) == (nodes * RANKS_PER_NODE, 3 * nodes + 2 * RANKS_PER_NODE + 1, 6)
