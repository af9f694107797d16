"""Measures a rank's time outside computation: encoding, decoding, and waiting for each lane."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from megatron_zpp.comm.lanes import Hop, Lanes


class StopwatchLanes:
    """Lanes that measure while `is_running`: seconds of hops before and after their collective, and seconds of waits.

    Codecs run beside computation, on a thread of their own, or during a wait. On CUDA only the host's time is measured.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.is_running = False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.collectives = 0

    def submit(self, hop: Hop) -> None:
        if self.is_running:
            hop.prepare = self._timed(hop.prepare, f"encode {hop.lane}")
            hop.launch = self._timed(hop.launch, f"start {hop.lane}", counts=True)
            hop.land = self._timed(hop.land, f"decode {hop.lane}")
        self._lanes.submit(hop)

    def wait(self, hop: Hop) -> None:
        if not self.is_running or hop.has_landed:
            self._lanes.wait(hop)
            return
        before = time.perf_counter()
        self._lanes.wait(hop)
        self.seconds[f"wait {hop.lane}"] += time.perf_counter() - before

    def drain(self) -> None:
        self._lanes.drain()

    def readings(self) -> dict[str, float]:
        """Seconds by kind and the number of collectives since the last call."""
        taken = {**self.seconds, "collectives": float(self.collectives)} if self.collectives else {}
        self.seconds.clear()
        self.collectives = 0
        return taken

    def _timed(self, call: Callable[[], Any], kind: str, *, counts: bool = False) -> Callable[[], Any]:
        def timed() -> Any:
            before = time.perf_counter()
            result = call()
            self.seconds[kind] += time.perf_counter() - before
            self.collectives += counts and result is not None
            return result

        return timed
