from __future__ import annotations

from threading import Event

import pytest
from harness.patience import PATIENCE_SECONDS

from megatron_zpp.parallel.failures import unlimited_wait
from megatron_zpp.parallel.failures.unlimited_wait import ended_by_failures


class Ended:
    """What ends the waiting block in place of the end of the process."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.event = Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.event.set()


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlimited_wait, "LOOK_SECONDS", 0.01)


def test_a_wait_is_ended_with_the_failure_of_another_rank() -> None:
    def check_others() -> None:
        raise RuntimeError("another rank has failed")

    ended = Ended()
    with ended_by_failures(check_others, PATIENCE_SECONDS, ended):
        assert ended.event.wait(PATIENCE_SECONDS)
    assert ended.reasons == ["another rank has failed"]


def test_a_wait_is_ended_after_the_limit_though_no_rank_has_failed() -> None:
    ended = Ended()
    with ended_by_failures(lambda: None, 0.0, ended):
        assert ended.event.wait(PATIENCE_SECONDS)
    assert ended.reasons == ["not done after 0 s"]


def test_a_wait_that_is_over_is_not_ended_and_its_own_error_passes() -> None:
    ended, looked = Ended(), Event()
    with pytest.raises(RuntimeError, match="its own"), ended_by_failures(looked.set, PATIENCE_SECONDS, ended):
        assert looked.wait(PATIENCE_SECONDS)
        raise RuntimeError("its own")
    assert not ended.reasons
