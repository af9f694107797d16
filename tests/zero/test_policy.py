from __future__ import annotations

import pytest

from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.policy import POLICIES, Policy, Rung

PRIMARY, SECONDARY, FULL = Rung.PRIMARY, Rung.SECONDARY, Rung.FULL


def test_each_stage_shards_one_state_more_than_the_stage_before() -> None:
    sharded = [[rung is PRIMARY for rung in (row.optimizer, row.gradients, row.weights_in_step)] for row in POLICIES.values()]
    assert list(POLICIES) == [0, 1, 2, 3]
    assert sharded == [[False, False, False], [True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize(
    "row",
    [
        (SECONDARY, FULL, FULL),
        (FULL, PRIMARY, FULL),
        (FULL, FULL, PRIMARY),
    ],
)
def test_a_row_without_a_meaning_is_refused(row: tuple[Rung, Rung, Rung]) -> None:
    with pytest.raises(UserError, match="rung"):
        Policy(*row)
