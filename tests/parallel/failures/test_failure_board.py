"""Ranks learn of each other's failures, and a store that no longer answers blocks no rank."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from megatron_zpp.parallel.failures import failure_board
from megatron_zpp.parallel.failures.failure_board import FailureBoard


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
    monkeypatch.setattr(failure_board, "SIGN_SECONDS", 0.1)


def test_while_nobody_has_failed_a_check_passes() -> None:
    FailureBoard(dist.HashStore(), 0, 2).check()


def test_the_first_failure_is_what_every_rank_reports() -> None:
    store = dist.HashStore()
    first = FailureBoard(store, 1, 2).report("out of memory")
    assert first.startswith("rank 1: out of memory")
    assert FailureBoard(store, 0, 2).report("connection closed") == first


def test_the_first_failure_names_ranks_that_neither_wait_nor_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    waiting = FailureBoard(store, 1, 4)
    looks = iter([waiting.check])  # while rank 0 checks which ranks are alive, rank 1 waits and calls check
    monkeypatch.setattr(failure_board.time, "sleep", lambda _: next(looks, lambda: None)())
    store.set(failure_board._ended_key(2), "")
    assert FailureBoard(store, 0, 4).report("connection closed") == "rank 0: connection closed (no sign of life from rank 3)"


def test_a_check_raises_once_another_rank_has_failed() -> None:
    store = dist.HashStore()
    FailureBoard(store, 1, 2).report("out of memory")
    with pytest.raises(RuntimeError, match="another rank has failed"):
        FailureBoard(store, 0, 2).check()


def test_a_check_raises_when_the_store_is_lost() -> None:
    with pytest.raises(RuntimeError, match="connection reset"):
        FailureBoard(LostStore(), 1, 2).check()


def test_a_silent_store_holds_neither_checks_nor_a_report_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_board, "REPORT_SECONDS", 0.3)
    store = SilentStore()
    started = time.monotonic()
    board = FailureBoard(store, 1, 2)
    board.check()
    board.check()
    assert board.report("timed out") == "rank 1: timed out"
    assert time.monotonic() - started < 3.0
    store.gate.set()
