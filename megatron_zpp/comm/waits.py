"""How a rank waits for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_zpp.monitor.observer import Observer

WATCH_SECONDS = 1.0  # of waiting between two calls of `watch`


@dataclass(frozen=True)
class Waits:
    """watch: called now and then during a long wait; it raises if another rank has failed. None: nothing is called.

    observer: is told of collectives and of waits for them.
    ranks: what each rank of the grid is called in errors; by default as in the grid.
    """

    watch: Callable[[], None] | None = None
    observer: Observer = field(default_factory=Observer)
    ranks: Sequence[int] | None = None
