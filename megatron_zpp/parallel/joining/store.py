"""Opens the store at a place: rank 0 holds it, unless torchrun does, and the other ranks connect."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_zpp.parallel.failures.question import NoAnswer, answer_within
from megatron_zpp.parallel.joining.gathering import INVITATION
from megatron_zpp.parallel.joining.member import ForeignEntry, Invitation, Member, decoded_invitation, encoded
from megatron_zpp.parallel.joining.place import JoinError, Place, PortInUse, is_of_this_machine

POLL_SECONDS = 0.2
ASK_SECONDS = 5.0  # for the holder of a port to say who it is
PREFIX = "megatron_zpp"
HERE = "127.0.0.1"
LIBUV_TAKES_SOCKETS = "2.8"  # the version of torch from which on its default store does; the other one always did


def held_store(place: Place, invitation: Invitation, timeout: timedelta) -> dist.Store:
    """A store that this process, rank 0, holds at the place, with an invitation for the other ranks.

    Raises JoinError if another program listens there, naming the run if it is one, and if the place is not on this machine.
    """
    addresses = place.addresses()
    try:
        listening = place.listen()
    except PortInUse:
        raise JoinError(_port_is_in_use(place)) from None
    store = dist.TCPStore(
        HERE,
        place.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
        use_libuv=torch.__version__ >= LIBUV_TAKES_SOCKETS,
    )
    part = dist.PrefixStore(PREFIX, store)
    part.set(INVITATION, encoded(invitation))
    if not any(map(is_of_this_machine, addresses)) and not any(_leads_to(place, address, invitation) for address in addresses):
        raise JoinError(
            f"MASTER_ADDR={place.host} ({', '.join(addresses)}) is not an address of {socket.gethostname()}, where rank 0 runs, and does "
            "not lead there; set MASTER_ADDR to a name or an address of this host that the other hosts know"
        )
    return part


def reached_store(place: Place, timeout: timedelta, tell: Callable[[str], None]) -> tuple[dist.Store, str]:
    """The store that another process holds at the place, and its address; waits for it without a limit.

    tell: gets what is waited for, now and then.
    """
    addresses = place.addresses()
    address = ""
    while not address:
        address, why = place.first_answering(addresses)
        if not address:
            tell(why)
            time.sleep(POLL_SECONDS)
    tell("something listens there, but does not answer as the store of a run does")
    return connected_store(address, place.port, timeout), address


def connected_store(address: str, port: int, timeout: timedelta) -> dist.Store:
    """A connection of its own to the store of another process, or of this one."""
    return dist.PrefixStore(PREFIX, dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout))


def _port_is_in_use(place: Place) -> str:
    where = f"MASTER_PORT={place.port} is in use on {socket.gethostname()}, where rank 0 runs"
    remedy = "choose another MASTER_PORT"
    holder = _holder(HERE, place.port)
    if holder is None:
        return f"{where}, by another program; {remedy}"
    return f"{where}, by another run: {holder}, rank 0 of {holder.world_size}; {remedy}, or wait for the end of that run"


def _leads_to(place: Place, address: str, invitation: Invitation) -> bool:
    """Whether this process's own store answers at the address, as it does behind a router or a proxy."""
    return place.first_answering([address])[0] != "" and _holder(address, place.port) == invitation.rank_0


def _holder(address: str, port: int) -> Member | None:
    """Rank 0 of the run whose store answers there; None if that is something else, or does not answer."""

    def ask() -> Member:
        # A timeout that is never reached: torch would print it.
        store = connected_store(address, port, timedelta(seconds=60 * ASK_SECONDS))
        while not store.check([INVITATION]):
            time.sleep(POLL_SECONDS)
        return decoded_invitation(store.get(INVITATION)).rank_0

    try:
        return answer_within(ASK_SECONDS, ask)
    except (NoAnswer, RuntimeError, ForeignEntry):
        return None
