"""Times calls on a device, and says how much of one is hidden when two run beside each other."""

from __future__ import annotations

import time as clock
from collections.abc import Callable

from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place

MOST_EXPOSED = 0.3  # of the shorter of copies and products, if they run beside each other


def report_overlap(outcome: Outcome, copying: float, multiplying: float, together: float, what: str = "copies") -> None:
    longer, shorter = max(copying, multiplying), min(copying, multiplying)
    exposed = (together - longer) / shorter
    outcome.check(f"beside each other, {exposed:.0%} of the shorter of {what} and products is not hidden", holds=exposed < MOST_EXPOSED)


def seconds_of(place: Place, call: Callable[[], object]) -> float:
    """Seconds of a call until the device has done its work."""
    place.synchronize()
    start = clock.perf_counter()
    call()
    place.synchronize()
    return clock.perf_counter() - start
