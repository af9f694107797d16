"""Where the ranks meet: the host and port that MASTER_ADDR and MASTER_PORT name. Whatever is wrong with them is one sentence (no torch)."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass

from megatron_zpp.system.user_error import UserError

RESOLVE_SECONDS = 10.0  # a name server may learn of a host a little later than its ranks start
POLL_SECONDS = 0.2
CONNECT_SECONDS = 3.0
BACKLOG = 4096


class JoinError(UserError):
    """This rank cannot join the run; its text says why and what to do."""


class PortInUse(Exception):
    """Another process listens at the port."""


@dataclass(frozen=True)
class Place:
    """A host, by name or address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"MASTER_ADDR={self.host}, MASTER_PORT={self.port}"

    def addresses(self) -> list[str]:
        """The addresses of the host, in numbers. Raises JoinError if its name is not known within RESOLVE_SECONDS."""
        deadline = time.monotonic() + RESOLVE_SECONDS
        while True:
            try:
                found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                if isinstance(error, OSError) and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                    continue
                why = error.strerror if isinstance(error, OSError) else str(error)
                raise JoinError(
                    f"MASTER_ADDR={self.host} is not known on {socket.gethostname()} ({why}); "
                    "set MASTER_ADDR to a name or an address of the host of rank 0 that every host knows"
                ) from None
            return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def listen(self) -> socket.socket:
        """A socket of this machine that listens at the port.

        Raises PortInUse if another does, and JoinError if this process may not.
        """
        try:
            return _server(self.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse from None
            raise JoinError(
                f"rank 0 cannot listen at MASTER_PORT={self.port} of {socket.gethostname()} ({os.strerror(error.errno or 0)}); "
                "choose another port, for instance between 1024 and 32767"
            ) from None

    def first_answering(self, addresses: list[str]) -> tuple[str, str]:
        """The first of the addresses that accepts a connection, and ""; if none does, "" and the reason."""
        why = "no address"
        for address in addresses:
            try:
                socket.create_connection((address, self.port), CONNECT_SECONDS).close()
            except OSError as error:
                why = "no answer" if isinstance(error, TimeoutError) else os.strerror(error.errno or 0).lower()
            else:
                return address, ""
        return "", why


def is_of_this_machine(address: str) -> bool:
    """Whether the address, in numbers, is one of this machine's. One that leads here through a router or a proxy is not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _server(port: int) -> socket.socket:
    """Listens on all addresses of this machine, of IPv6 and IPv4 if it has both."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("", port), backlog=BACKLOG)
