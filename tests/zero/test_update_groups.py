from __future__ import annotations

from megatron_zpp.zero.schedule import Actions
from megatron_zpp.zero.update_groups import coming_with, update_groups

NAMES = ["embedding", "block.0", "block.1", "block.2", "final_norm"]
FIRST = Actions(climb_to_full=("block.0", "embedding"), climb_to_secondary=("block.1",))


LATER = Actions(climb_to_full=("block.1", "final_norm"), climb_to_secondary=("block.2",))


def test_a_device_behind_the_host_gets_what_is_needed_first_and_then_all_others() -> None:
    assert update_groups(NAMES, [FIRST, LATER], at_once=True) == [[1, 0, 2], [4, 3]]


def test_elsewhere_units_are_updated_one_by_one_in_the_order_in_which_they_climb() -> None:
    assert update_groups(NAMES, [FIRST, LATER], at_once=False) == [[1], [0], [2], [4], [3]]


def test_no_group_is_empty() -> None:
    assert update_groups(NAMES[:3], [FIRST], at_once=True) == [[1, 0, 2]]
    assert update_groups(NAMES, [Actions(), LATER], at_once=True) == [[2, 4, 3, 0, 1]]


def test_gradients_come_one_group_ahead_and_each_once() -> None:
    assert [coming_with(group, "abcd") for group in range(4)] == ["ab", "c", "d", ""]
