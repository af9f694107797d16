"""The time that is left for a part."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """Ends `seconds` after it is made. clock: seconds, rising."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def remaining_seconds(self) -> float:
        return max(0.0, self._end - self._clock())

    def has(self, seconds: float) -> bool:
        """Whether at least this much time is left."""
        return self.remaining_seconds() >= seconds
