from __future__ import annotations

import pytest

from megatron_zpp.training.host_threads import threads_of_rank

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    "hosts, cores, expected",
    [
        (["a"], [range(16)], [16]),
        (["a"] * 4, [range(16)] * 4, [4] * 4),
        (["a"] * 3, [range(16)] * 3, [5] * 3),
        (["a", "a", "b", "b"], [range(16)] * 2 + [range(6)] * 2, [8, 8, 3, 3]),
        (["a"] * 8, [range(4)] * 8, [1] * 8),
        (["a", "a"], [range(8), range(8, 16)], [8, 8]),  # the launcher has divided the cores already
        (["a"] * 4, [range(8), range(8), range(8, 24), range(8, 24)], [4, 4, 8, 8]),
    ],
)
def test_threads_are_the_cores_of_a_rank_divided_by_the_ranks_that_share_them(
    hosts: list[str], cores: list[range], expected: list[int]
) -> None:
    assert [threads_of_rank(rank, hosts, cores) for rank in range(len(hosts))] == expected
    for host in set(hosts):
        of_host = [rank for rank, name in enumerate(hosts) if name == host]
        available = set().union(*(cores[rank] for rank in of_host))
        assert sum(expected[rank] for rank in of_host) <= max(len(available), len(of_host))
