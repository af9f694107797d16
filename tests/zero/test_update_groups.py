from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.small_engine import Job, Rank
from harness.worlds import run_world

from megatron_zpp.comm.host_link import Arrival
from megatron_zpp.zero.policy import POLICIES, with_offloaded_optimizer
from megatron_zpp.zero.schedule import Actions, update_groups

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


@pytest.mark.virtual
def test_gradients_start_to_come_to_the_host_one_group_ahead_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    number = dict[int, int]()

    def noting(name: str) -> Callable[[Arrival], None]:
        original = getattr(Arrival, name)

        def noted(self: Arrival) -> None:
            calls.append((name, number.setdefault(id(self), len(number))))
            original(self)

        return noted

    for name in ("start", "wait"):
        monkeypatch.setattr(Arrival, name, noting(name))
    run_world((1, 1), lambda backend: Rank(Job(with_offloaded_optimizer(POLICIES[3]), steps=1), backend).train())
    assert calls == [("start", 0), ("start", 1), ("wait", 0), ("start", 2), ("wait", 1), ("start", 3), ("wait", 2), ("wait", 3)]
