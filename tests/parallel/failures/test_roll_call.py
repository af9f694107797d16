import threading
import time

import pytest
import torch.distributed as dist

from megatron_zpp.parallel.failures import pulse, roll_call
from megatron_zpp.parallel.failures.pulse import Pulse
from megatron_zpp.parallel.failures.question import NoAnswer
from megatron_zpp.parallel.failures.roll_call import RollCall


def never_fails() -> None:
    return None


class Rank(threading.Thread):
    """One rank of a world that shares a store; its work takes the given seconds."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
        super().__init__()
        self.call = RollCall(store, rank, world_size, "building", never_fails, silent_seconds=5.0)
        self.seconds = seconds
        self.lines: list[str] = []
        self.left_at = 0.0
        self.start()

    def run(self) -> None:
        with self.call.after(self.lines.append):
            time.sleep(self.seconds)
        self.left_at = time.monotonic()


def test_all_ranks_leave_together_after_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "LINE_SECONDS", 0.3)
    store = dist.HashStore()
    started = time.monotonic()
    ranks = [Rank(store, rank, 3, seconds) for rank, seconds in enumerate((0.0, 0.1, 0.8))]
    for rank in ranks:
        rank.join(30)
    assert all(rank.left_at - started >= 0.8 for rank in ranks)
    assert ranks[0].lines[0].startswith("waiting for rank 2 of 3: building (")
    assert ranks[2].lines == []


def test_a_rank_that_fails_in_its_work_does_not_wait_and_the_others_learn_of_it() -> None:
    store = dist.HashStore()

    def another_failed() -> None:
        raise RuntimeError("another rank has failed")

    with pytest.raises(OSError, match="disk"), RollCall(store, 0, 2, "building", never_fails).after(print):
        raise OSError("disk")
    with pytest.raises(RuntimeError, match="another rank has failed"), RollCall(store, 1, 2, "building", another_failed).after(print):
        pass


@pytest.mark.parametrize(("waiting", "dead"), [(0, 1), (1, 0), (2, 0)])
def test_a_rank_without_a_sign_of_life_ends_the_wait_of_every_rank_by_name(
    monkeypatch: pytest.MonkeyPatch, waiting: int, dead: int
) -> None:
    monkeypatch.setattr(roll_call, "CHECK_SECONDS", 0.1)
    store, others = dist.HashStore(), {0, 1, 2} - {waiting, dead}
    for rank in others:
        store.add(f"roll call/building/done/{rank}", 1)
        store.add("roll call/building/done", 1)
    with (
        pytest.raises(RuntimeError, match=f"rank {dead} has shown no life for 0 s while the others wait for it: building"),
        RollCall(store, waiting, 3, "building", never_fails, silent_seconds=0.3).after(print),
    ):
        pass


def test_a_slow_rank_that_lives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LINE_SECONDS": 0.1, "CHECK_SECONDS": 0.1}.items():
        monkeypatch.setattr(roll_call, name, seconds)
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.05)
    store = dist.HashStore()
    pulses = [Pulse(store, rank, 60.0, never_fails) for rank in range(2)]
    ranks = [Rank(store, 0, 2, 0.0), Rank(store, 1, 2, 1.5)]
    for rank in ranks:
        rank.join(30)
    assert all(rank.left_at > 0 for rank in ranks)
    for one in pulses:
        one.stop()


class SilentStore(dist.HashStore):
    """A store whose holder is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def add(self, key: str, count: int) -> int:
        self.gate.wait()
        return 0


def test_a_store_that_does_not_answer_ends_the_wait() -> None:
    store = SilentStore()
    with (
        pytest.raises(NoAnswer, match="has not answered"),
        RollCall(store, 1, 2, "building", never_fails, silent_seconds=0.1).after(print),
    ):
        pass
    store.gate.set()


def test_a_pulse_tells_when_the_store_has_gone_silent() -> None:
    store, silent = SilentStore(), threading.Event()
    silence = Pulse(store, 1, 0.1, silent.set)
    assert silent.wait(30)
    store.gate.set()
    silence.stop()
