"""Ranks learn of each other's failures, and a store that no longer answers blocks no rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch.distributed as dist

from megatron_zpp.parallel.failures import failure_board
from megatron_zpp.parallel.failures.failure_board import FailureBoard, Keeper
from megatron_zpp.parallel.failures.pulse import pulse_key


class SilentStore(dist.HashStore):
    """A store behind a cut link: no call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.gate.wait()
        return False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.gate.wait()
        return b""


class LostStore(dist.HashStore):
    """A store whose host has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("connection reset")


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"SIGN_SECONDS": 0.1, "LIFE_SECONDS": 0.2, "LOOK_SECONDS": 0.05, "REPORT_SECONDS": 0.3}.items():
        monkeypatch.setattr(failure_board, name, seconds)


def test_while_nobody_has_failed_a_check_passes() -> None:
    FailureBoard(dist.HashStore(), 0, 2).check()


def test_the_first_failure_is_what_every_rank_reports() -> None:
    store = dist.HashStore()
    first = FailureBoard(store, 1, 2).report("out of memory")
    assert first.endswith("rank 1: out of memory)")
    assert FailureBoard(store, 0, 2).report("connection closed") == first


def live(monkeypatch: pytest.MonkeyPatch, *signs: Callable[[], object]) -> None:
    """While a rank looks which others are alive, they give these signs."""
    monkeypatch.setattr(failure_board.time, "sleep", lambda _: [sign() for sign in signs])


def test_the_first_failure_names_the_ranks_that_have_neither_a_pulse_nor_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    live(monkeypatch, lambda: store.add(pulse_key(1), 1))
    store.add(failure_board._ended_key(2), 1)
    said = FailureBoard(store, 0, 5).report("connection closed")
    assert said == "ranks 3, 4 show no sign of life (noticed by rank 0: connection closed)"


class CountingStore(dist.HashStore):
    def __init__(self) -> None:
        super().__init__()
        self.questions = 0

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return super().check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.questions += 1
        return super().multi_get(keys)

    def add(self, key: str, count: int) -> int:
        self.questions += 1
        return super().add(key, count)


def test_the_report_of_one_rank_of_thousands_asks_for_all_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for ranks in (20, 2000):
        store = CountingStore()
        for rank in range(ranks):
            FailureBoard(store, rank, ranks).enter()
            store.add(pulse_key(rank), 1)
        clock = iter(range(1000))
        monkeypatch.setattr(failure_board.time, "monotonic", lambda clock=clock: 0.01 * next(clock))
        monkeypatch.setattr(failure_board.time, "sleep", lambda _: None)
        store.questions = 0
        assert "show no sign of life" in FailureBoard(store, 1, ranks).report("connection closed")
        asked.append(store.questions)
    assert asked[0] == asked[1] < 200


def test_ranks_that_live_are_named_if_they_alone_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    signs = (pulse_key(1), pulse_key(2), failure_board._signs_key(1))
    live(monkeypatch, *(partial(store.add, key, 1) for key in signs))
    assert FailureBoard(store, 0, 3).report("timed out") == "rank 0: timed out (busy or hanging: rank 2)"


def test_a_failure_while_all_others_live_and_work_names_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    live(monkeypatch, lambda: store.add(pulse_key(1), 1))
    assert FailureBoard(store, 0, 2).report("disk full") == "rank 0: disk full"


def test_a_failure_that_no_other_rank_can_have_caused_names_nobody_else() -> None:
    store = dist.HashStore()
    assert FailureBoard(store, 2, 4).report("its launcher has died", is_cause=True) == "rank 2: its launcher has died"
    assert FailureBoard(store, 0, 4).report("connection closed") == "rank 2: its launcher has died"


def test_a_check_raises_once_another_rank_has_failed() -> None:
    store = dist.HashStore()
    FailureBoard(store, 1, 2).report("out of memory")
    with pytest.raises(RuntimeError, match="another rank has failed"):
        FailureBoard(store, 0, 2).check()


def test_a_check_raises_when_the_store_is_lost() -> None:
    with pytest.raises(RuntimeError, match="connection reset"):
        FailureBoard(LostStore(), 1, 2).check()


def test_if_the_store_is_closed_its_holder_is_named_and_no_survivor() -> None:
    said = FailureBoard(LostStore(), 1, 2, Keeper("rank 0", "node7")).report("reset by peer")
    assert said == "rank 0 shows no sign of life: the store that it holds at node7 is closed (noticed by rank 1: reset by peer)"


def test_if_the_store_is_silent_its_holder_is_named_and_nobody_is_held_up() -> None:
    store = SilentStore()
    board = FailureBoard(store, 1, 2, Keeper("torchrun", "node7"))
    board.check()
    board.check()
    said = board.report("timed out")
    assert said == "torchrun shows no sign of life: the store that it holds at node7 does not answer (noticed by rank 1: timed out)"
    store.gate.set()


def test_a_failure_that_was_read_before_the_store_was_lost_stays_the_first() -> None:
    class Ending(dist.HashStore):
        has_ended = False

        def add(self, key: str, count: int) -> int:
            if self.has_ended:
                raise dist.DistNetworkError("connection reset")
            return super().add(key, count)

    store = Ending()
    first = FailureBoard(store, 2, 3).report("out of memory")
    board = FailureBoard(store, 1, 3, Keeper("rank 0", "node7"))
    with pytest.raises(RuntimeError, match="another rank has failed"):
        board.check()
    store.has_ended = True
    assert board.report("another rank has failed") == first
