"""benchmarks/long_sequences.py on short samples: ranks that divide one have its loss, and a limit ends a run with the reason."""

from __future__ import annotations

import pytest

from benchmarks.long_sequences import MIB, Limited, Measured, RunFailed, about, run

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def alone() -> Measured:
    """One rank whose limit is higher than its need."""
    return run(64, 1, 400 * MIB)


def test_ranks_that_divide_a_sample_have_the_losses_of_one_rank_and_a_smaller_plan(alone: Measured) -> None:
    together = run(64, 2)
    assert together.losses == pytest.approx(alone.losses, rel=1e-6)
    assert 0 < together.planned_bytes < alone.planned_bytes and together.peak_bytes > 0


def test_a_rank_that_needs_more_than_its_limit_ends_with_the_reason(alone: Measured) -> None:
    with pytest.raises(RunFailed, match="[Mm]emory|allocate") as found:  # torch, numpy and C++ have words of their own
        run(4096, 1, 40 * MIB)
    assert "\n" not in str(found.value)
    limited = Limited(40 * MIB, alone, None, str(found.value))
    assert about(limited).endswith(f"one rank with as much ends: {found.value}")
