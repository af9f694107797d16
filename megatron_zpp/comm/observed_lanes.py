"""Lanes that report their hops to an observer while it listens. A run without an observer uses plain lanes and pays nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

from megatron_zpp.comm.lanes import Hop, Lanes
from megatron_zpp.comm.links import INTER_CLIMB, INTER_DESCEND, INTRA_CLIMB, INTRA_DESCEND
from megatron_zpp.monitor.observer import Observer

# For each lane, the timer (monitor.timers) of the time that computation waits for its hops.
WAIT_TIMERS = {
    INTER_CLIMB: "params-all-gather-inter",
    INTRA_CLIMB: "params-all-gather-intra",
    INTRA_DESCEND: "grads-reduce-scatter-intra",
    INTER_DESCEND: "grads-reduce-scatter-inter",
}
# The rung on which the hops of a lane arrive.
_RUNGS = {
    INTER_CLIMB: "secondary",
    INTRA_CLIMB: "full",
    INTRA_DESCEND: "secondary",
    INTER_DESCEND: "primary",
}

Result = TypeVar("Result")


class ObservedLanes:
    """The lanes of a rank. Reports what the host does for each hop: encoding, sending, decoding and waiting.

    A wait for a hop first waits for the hop that must land before it, so that the wait for each link is reported separately.
    """

    def __init__(self, lanes: Lanes, observer: Observer) -> None:
        self._lanes = lanes
        self._observer = observer
        self._waited_for: WeakSet[Hop] = WeakSet()

    def submit(self, hop: Hop) -> None:
        if not self._observer.is_on:
            self._lanes.submit(hop)
            return
        hop.prepare = self._reported(f"{range_name(hop)} encode", hop.prepare)
        hop.launch = self._reported(f"{range_name(hop)} send", hop.launch)
        hop.land = self._reported(f"{range_name(hop)} decode", hop.land)
        self._lanes.submit(hop)

    def wait(self, hop: Hop) -> None:
        if hop in self._waited_for or not self._observer.is_on:
            self._lanes.wait(hop)
            return
        if hop.after is not None:
            self.wait(hop.after)
        with self._observer.phase(WAIT_TIMERS[hop.lane]), self._observer.hop(f"{range_name(hop)} wait"):
            self._lanes.wait(hop)
        self._waited_for.add(hop)

    def drain(self) -> None:
        self._lanes.drain()

    def _reported(self, name: str, call: Callable[[], Result]) -> Callable[[], Result]:
        def reported() -> Result:
            with self._observer.hop(name):
                return call()

        return reported


def range_name(hop: Hop) -> str:
    """`block.3 inter-climb to secondary`: unit, link, direction, and the rung on which the hop arrives."""
    return f"{hop.name} {hop.lane} to {_RUNGS[hop.lane]}"
