"""What all tests share: real ranks, the tiers, and one profile of hypothesis. Nothing depends on the clock or on a name server."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import tiers
from harness.quick_disk import forget_fsync
from harness.rank_pool import RankPool
from hypothesis import HealthCheck, settings

# Every run sees the same examples, however slow the machine is. The long profile looks for new ones.
settings.register_profile("statements", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("statements"), derandomize=False, print_blob=True, max_examples=1000)
settings.load_profile("statements")

# No test asks a name server. torch looks up the name of every address that it connects to, and waits 5 seconds for a server that is silent.
os.environ["RES_OPTIONS"] = "attempts:0"

forget_fsync()

gc.set_threshold(100_000)  # while tests are collected, hardly anything becomes garbage

INTEGRATION = Path(__file__).parent / "integration"


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that real worlds are made of, started when the first test asks for them."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their tier
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives every test its tier, and begins with the cheapest.

    Among workers (pytest -n) a file's tests of one tier stay together, and those that share a library that they compile. What takes longest
    comes first, so that no worker is left alone with it: these libraries, then processes, then threads.
    """
    ranks: dict[pytest.Item, tuple[bool, int]] = {}
    for item in items:
        tier, compiles = _tier_of(item), _compiles(item)
        item.add_marker(tier)
        item.add_marker(pytest.mark.xdist_group("libraries" if compiles else f"{tier}-{item.path.name}"))
        ranks[item] = (compiles, tiers.TIERS.index(tier))
    has_workers = hasattr(config, "workerinput") or bool(getattr(config.option, "numprocesses", None))
    items.sort(key=ranks.__getitem__, reverse=has_workers)


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> None:
    """Collections of garbage would take a quarter of the time: they are rarer, and leave out what was there before a file's first test."""
    gc.set_threshold(10_000)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _tier(request: pytest.FixtureRequest) -> Iterator[None]:
    with tiers.entered(_tier_of(request.node)):
        yield


def _compiles(item: pytest.Item) -> bool:
    return item.get_closest_marker("compiles") is not None


def _tier_of(item: pytest.Item) -> str:
    if item.get_closest_marker("gloo") or "ranks" in getattr(item, "fixturenames", ()) or item.path.parent == INTEGRATION:
        return "gloo"
    return "virtual" if item.get_closest_marker("virtual") else "pure"
