"""Collections of Python's garbage: where flags put them, and nowhere else."""

from __future__ import annotations

import gc

import pytest

from megatron_zpp.config.schema import TrainingConfig
from megatron_zpp.training.garbage import GarbageCollection


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every collection that is asked for."""
    found: list[int] = []

    def collect(generation: int = 2) -> int:
        found.append(generation)
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    return found


def collections_of_six_iterations(training: TrainingConfig, collections: list[int]) -> list[int]:
    """How many collections there had been at the start, after each iteration, and after an evaluation."""
    with GarbageCollection(training) as garbage:
        counts = [len(collections)]
        for iteration in range(1, 7):
            garbage.after_iteration(iteration)
            counts.append(len(collections))
        with garbage.evaluation():
            counts.append(len(collections))
    return [*counts, len(collections)]


def test_collections_happen_where_the_flags_say(collections: list[int]) -> None:
    training = TrainingConfig(manual_gc=True, manual_gc_interval=3)
    assert collections_of_six_iterations(training, collections) == [1, 1, 1, 2, 2, 2, 3, 4, 5]
    collections.clear()
    training = TrainingConfig(manual_gc=True, no_manual_gc_eval=True)
    assert collections_of_six_iterations(training, collections) == [1] * 9
    collections.clear()
    assert collections_of_six_iterations(TrainingConfig(), collections) == [0] * 9


def test_the_collector_is_off_within_and_on_again_after_an_error() -> None:
    with pytest.raises(RuntimeError), GarbageCollection(TrainingConfig(manual_gc=True)):
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()
