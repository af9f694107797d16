"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that real worlds are made of, started when the first test asks for them."""
    pool = RankPool()
    yield pool
    pool.close()
