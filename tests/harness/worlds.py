"""Virtual worlds for tests: ranks as threads that take turns.

Left to themselves, the threads of a world spend most of their time asking each other for the interpreter. Here one of them computes at a
time, and hands over where it has to wait for another; all of them stay on one core. Bits and bytes do not depend on it. Tests of races let
all threads run at once, on all cores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast
from unittest import mock

from harness import tiers
from harness.rank_threads import on_one_core
from megatron_zpp.comm import lanes
from megatron_zpp.comm.backend import VirtualBackend, VirtualWorld, _Round
from megatron_zpp.comm.lanes import Hop, ThreadLanes
from megatron_zpp.parallel.grid import Grid

Result = TypeVar("Result")


class Turn:
    """What one thread of a world holds while it computes: `with turn`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._owner = None
        self._lock.release()

    @property
    def is_held_here(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    def given_away(self) -> AbstractContextManager[None]:
        """Lets others compute meanwhile; where this thread has no turn it changes nothing."""
        return _GivenAway(self) if self.is_held_here else nullcontext()


class _GivenAway:
    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def __enter__(self) -> None:
        self._turn.__exit__()

    def __exit__(self, *error: object) -> None:
        self._turn.__enter__()


_of_thread = threading.local()


def waiting() -> AbstractContextManager[None]:
    """Must be around whatever makes a rank wait for another in ways of its own, as barriers do."""
    turn: Turn | None = getattr(_of_thread, "turn", None)
    return nullcontext() if turn is None else turn.given_away()


class Barrier(threading.Barrier):
    """A barrier of ranks that may take turns."""

    def wait(self, timeout: float | None = None) -> int:
        with waiting():
            return super().wait(timeout)


class TurnLanes(ThreadLanes):
    """The lanes of the rank that makes them: their thread takes turns with the ranks."""

    def __init__(self, pause: Callable[[], None] = lambda: None, watch: Callable[[], None] = lambda: None) -> None:
        super().__init__(pause, watch)
        self._turn: Turn | None = getattr(_of_thread, "turn", None)

    def submit(self, hop: Hop) -> None:
        if self._turn is not None:
            hop.prepare, hop.launch, hop.land = map(self._in_turn, (hop.prepare, hop.launch, hop.land))
        super().submit(hop)

    def wait(self, hop: Hop) -> None:
        if not hop.has_landed:
            with waiting():
                super().wait(hop)

    def drain(self) -> None:
        with waiting():
            super().drain()

    def _in_turn(self, call: Callable[[], Any]) -> Callable[[], Any]:
        turn = cast(Turn, self._turn)

        def called() -> Any:
            with turn:
                return call()

        return called


class TurnWorld(VirtualWorld):
    """A world whose ranks take turns."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._turn = Turn()

    def run(self, program: Callable[[VirtualBackend], object]) -> list[object]:
        def in_turn(backend: VirtualBackend) -> object:
            with self._turn:
                _of_thread.turn = self._turn
                return program(backend)

        return super().run(in_turn)

    def wait_for(self, this_round: _Round) -> None:
        with self._turn.given_away():
            super().wait_for(this_round)

    def when_ended(self, this_round: _Round, call: Callable[[], None]) -> None:
        """A rank that asks for it while it computes is about to wait for the end."""
        if self._turn.is_held_here:
            self.wait_for(this_round)
        super().when_ended(this_round, call)


def run_world(
    shape: tuple[int, int] | Grid,
    program: Callable[[VirtualBackend], Result],
    limit_seconds: float = 120.0,
    *,
    takes_turns: bool = True,
) -> list[Result]:
    """What `program` returns on each rank; ranks that wait for each other in vain end with a TimeoutError.

    Lanes of ranks that take turns are TurnLanes, as those that shard() makes here.
    """
    tiers.require("virtual")
    grid = shape if isinstance(shape, Grid) else Grid.of_nodes(*shape)
    world = TurnWorld(grid) if takes_turns else VirtualWorld(grid)
    watch = threading.Timer(limit_seconds, _give_up, [world])
    watch.daemon = True
    watch.start()
    try:
        with _in_turns() if takes_turns else nullcontext():
            return cast(list[Result], world.run(program))
    finally:
        watch.cancel()


@contextmanager
def _in_turns() -> Iterator[None]:
    with on_one_core(), mock.patch.object(lanes, "ThreadLanes", TurnLanes):
        yield


def _give_up(world: VirtualWorld) -> None:
    with world._lock:
        world._failure = world._failure or TimeoutError("ranks of the virtual world wait for each other in vain")
        rounds = list(world._rounds.values())
        world._lock.notify_all()
    for this_round in rounds:
        this_round.call_back()
