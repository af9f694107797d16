"""Ranks as threads of one process that take turns, so that a study needs one core and no process waits for another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_zpp.comm.backend import VirtualBackend, VirtualWorld
from megatron_zpp.comm.lanes import Hop
from megatron_zpp.parallel.grid import Grid


class TurnWorld(VirtualWorld):
    """A virtual world in which one rank computes at a time, and hands over where it waits for another."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._turn = threading.Lock()

    def run(self, program: Callable[[VirtualBackend], Any]) -> list[Any]:
        def in_turn(backend: VirtualBackend) -> Any:
            with self._turn:
                return program(backend)

        return super().run(in_turn)

    def wait_for(self, this_round: Any) -> None:
        self._turn.release()
        try:
            super().wait_for(this_round)
        finally:
            self._turn.acquire()


class InlineLanes:
    """Lanes without a thread: a hop is prepared, launched and landed when it is submitted, as the streams of a GPU enqueue it.

    Every rank submits the same hops in the same order, so no rank waits in vain. A hop that must land before another was submitted earlier.
    """

    @torch.no_grad()
    def submit(self, hop: Hop) -> None:
        hop.prepare()
        work = hop.launch()
        if work is not None:
            work.wait()
        hop.land()
        hop.submitted = hop.prepared = hop.launched = hop.crossed = hop.landed = time.monotonic()

    def wait(self, hop: Hop) -> None:
        """Does nothing: the hop has landed."""

    def drain(self) -> None:
        """Does nothing: all hops have landed."""
