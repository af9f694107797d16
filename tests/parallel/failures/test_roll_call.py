import threading
from itertools import islice

import pytest
import torch.distributed as dist
from harness.patience import PATIENCE_SECONDS, ClockOfLife, SetClock, wait_until

from megatron_zpp.parallel.failures import pulse, roll_call
from megatron_zpp.parallel.failures.pulse import Pulse, pulse_key
from megatron_zpp.parallel.failures.question import NoAnswer, pauses
from megatron_zpp.parallel.failures.roll_call import SILENT_SECONDS, RollCall


def never_fails() -> None:
    return None


class Rank(threading.Thread):
    """One rank of a world that shares a store; its work lasts until `finish`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, finish: threading.Event) -> None:
        super().__init__()
        self.call = RollCall(store, rank, world_size, "building", never_fails, SILENT_SECONDS)
        self.finish = finish
        self.lines: list[str] = []
        self.has_left = False
        self.start()

    def run(self) -> None:
        with self.call.after(self.lines.append):
            self.finish.wait()
        self.has_left = True


def done() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_all_ranks_leave_together_after_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "time", clock := SetClock())
    store, slow = dist.HashStore(), threading.Event()
    ranks = [Rank(store, 0, 3, done()), Rank(store, 1, 3, done()), Rank(store, 2, 3, slow)]
    wait_until(lambda: {*ranks[:2]} <= clock.sleepers, "ranks 0 and 1 do not wait")
    clock.now = 31.0
    wait_until(lambda: len(ranks[0].lines) > 0, "rank 0 says nothing")
    assert not any(rank.has_left for rank in ranks)
    slow.set()
    for rank in ranks:
        rank.join(PATIENCE_SECONDS)
    assert all(rank.has_left for rank in ranks)
    assert [rank.lines for rank in ranks] == [["waiting for rank 2 of 3: building (31 s)"], [], []]


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
    monkeypatch.setattr(pulse, "PULSE_SECONDS", 0.01)
    store, slow = dist.HashStore(), threading.Event()
    clock = ClockOfLife(lambda: store.add(pulse_key(1), 0), seconds_per_sign=0.9 * SILENT_SECONDS)
    monkeypatch.setattr(roll_call, "time", clock)
    pulses = [Pulse(store, rank, 60.0, never_fails) for rank in range(2)]
    ranks = [Rank(store, 0, 2, done()), Rank(store, 1, 2, slow)]
    wait_until(lambda: clock.now > 5 * SILENT_SECONDS, "rank 0 does not wait")
    slow.set()
    for rank in ranks:
        rank.join(PATIENCE_SECONDS)
    assert all(rank.has_left for rank in ranks)
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
    assert silent.wait(PATIENCE_SECONDS)
    store.gate.set()
    silence.stop()


def test_pauses_between_questions_double_up_to_a_second() -> None:
    assert list(islice(pauses(), 9)) == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0]
