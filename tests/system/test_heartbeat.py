from __future__ import annotations

import threading
import time

import pytest
from harness.patience import PATIENCE_SECONDS

from megatron_zpp.system.heartbeat import beating


def test_it_beats_while_the_block_runs_and_not_after_it() -> None:
    beats = threading.Semaphore(0)
    with beating(beats.release, 0.001):
        assert all(beats.acquire(timeout=PATIENCE_SECONDS) for _ in range(5))
    while beats.acquire(blocking=False):
        pass
    time.sleep(0.05)
    assert not beats.acquire(blocking=False)


def test_an_error_of_the_block_ends_the_beating_too() -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), beating(lambda: None, 0.001):
        raise KeyError
    assert threading.active_count() == before
