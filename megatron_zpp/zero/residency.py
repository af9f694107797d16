"""Tracks which rungs of a unit's weights are fresh, on their way or at rest, and decides when they are filled and freed (no torch).

A rung is filled when it is needed, unless this rung or a higher one is fresh or on its way. It is freed when no use needs it, and when the
main weights change, because its values are then stale:

                  submitted              landed
    at rest  ------------------>  on its way  ---------->  fresh
       ^                                                     |
       +--------------- rest, invalidate --------------------+

The secondary rung is freed as soon as the full one has landed, unless the policy keeps it within a step. If the policy keeps a copy across
steps, the rung that holds the copy becomes stale like the others but keeps its storage, to which the next climb adds differences.

Where every rank has all main weights on its device, no hop fills a rung: the full one is a copy of them, and the secondary one is not
needed.

zero/unit.py carries these decisions out on tensors. A ticket stands for a hop under way.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.policy import Policy, Rung

Ticket = TypeVar("Ticket")
_CLIMBED = (Rung.SECONDARY, Rung.FULL)  # the rungs that a climb fills, lowest first


class Residency(Generic[Ticket]):
    """The rungs of one unit on one rank. It starts with every rung at rest.

    The main weights on the primary rung are always up to date. There, fresh means that their payload has been encoded.
    fills_without_hops: whether the full rung is a copy of main weights that every rank has.
    """

    def __init__(self, policy: Policy, topology: Topology) -> None:
        self._policy = policy
        self.fills_without_hops = policy.copies_main_weights(topology)
        self._fresh: set[Rung] = set()
        self._tickets: dict[Rung, Ticket] = {}

    def is_fresh(self, rung: Rung) -> bool:
        """Whether the rung holds the current weights."""
        return rung in self._fresh

    def needs(self, rung: Rung) -> tuple[Rung, ...]:
        """The rungs to fill so that `rung` will be fresh, lowest first; each is filled from the one before it.

        Empty if `rung` or a higher one is fresh or on its way. If this rank has all main weights, only the full rung is filled, as a copy.
        """
        if any(self._is_there(other) for other in _CLIMBED if other >= rung):
            return ()
        if self.fills_without_hops:
            return (Rung.FULL,) if rung is Rung.FULL else ()
        return tuple(other for other in _CLIMBED if other <= rung and not self._is_there(other))

    def submitted(self, rung: Rung, ticket: Ticket) -> None:
        """Notes that the hop that fills `rung` has been submitted."""
        self._tickets[rung] = ticket

    def filled(self, rung: Rung) -> None:
        """Notes that `rung` has been filled without a hop."""
        self._fresh.add(rung)

    def under_way(self) -> dict[Rung, Ticket]:
        """The rungs on their way, each with the ticket of its hop, lowest first."""
        return {rung: self._tickets[rung] for rung in _CLIMBED if rung in self._tickets}

    def ticket_below(self, rung: Rung) -> Ticket | None:
        """The ticket of the hop to the next lower rung, which a hop to `rung` must follow; None if no such hop is under way."""
        return self._tickets.get(Rung(rung - 1))

    def landed(self) -> tuple[Rung, ...]:
        """Marks every rung under way as fresh; returns the rungs to free. The full rung lands last."""
        if Rung.FULL not in self._tickets:
            raise RuntimeError("no climb to the full rung is under way")
        self._fresh.update(self._tickets)
        self._tickets.clear()
        return () if self._policy.weights_in_step is Rung.SECONDARY else self._drop(Rung.SECONDARY)

    def rest(self) -> tuple[Rung, ...]:
        """Ends a use of the weights; returns the rungs to free: those above the rung that the policy keeps within a step.

        Empty while a climb is under way, because a later use needs its result.
        """
        if self._tickets:
            return ()
        return self._drop(*(rung for rung in _CLIMBED if rung > self._policy.weights_in_step))

    def invalidate(self) -> tuple[Rung, ...]:
        """Makes every rung stale, because the main weights have changed; returns the rungs to free.

        Call it after every hop under way has landed: their results are dropped. If the policy keeps weights on the full rung within a step,
        that rung keeps its storage, and so does the rung of a copy that is kept across steps.
        """
        self._tickets.clear()
        self._fresh.clear()
        kept = self._policy.weights_in_step
        return tuple(rung for rung in _CLIMBED if rung is not kept or (rung is Rung.SECONDARY and not self._policy.keeps_copy))

    def _is_there(self, rung: Rung) -> bool:
        return rung in self._fresh or rung in self._tickets

    def _drop(self, *rungs: Rung) -> tuple[Rung, ...]:
        self._fresh.difference_update(rungs)
        return rungs
