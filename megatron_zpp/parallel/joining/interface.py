"""The network interface of this machine that leads to the other nodes of a run. The kernel chooses it; nothing is sent.

Without a name, gloo would take the address to which the name of this machine leads: 127.0.1.1 on a Debian, where no other machine finds it.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from torch.distributed import Store

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
LIST_IPV4 = 0x8912  # SIOCGIFCONF of Linux
ENTRY_BYTES, MOST_ENTRIES = 40, 1024  # struct ifreq: a name of 16 bytes, then family, port and address
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def interface_to_others(store: Store, rank: int, world_size: int, address: str) -> str:
    """The interface by which this rank reaches the ranks of other nodes; empty if all are on this machine, or if the kernel names none.

    Empty also for an address that the loopback interface has, as on hosts that announce their own routes: gloo would take 127.0.0.1 of it.
    address: in numbers, where this rank reaches rank 0. On the machine of rank 0 it may be 127.0.0.1: the ranks of other machines, which
    write down their own addresses in `store`, show the way there. Every rank must call it.
    """
    own = source_address(address)
    store.set(_key(rank), own)
    if is_loopback(own):
        others = (store.get(_key(other)).decode() for other in reversed(range(world_size)) if other != rank)
        own = next((source_address(other) for other in others if not is_loopback(other)), "")
    name = interface_with(own)
    return "" if name == LOOPBACK else name


def source_address(address: str) -> str:
    """The address of this machine from which it sends to `address`; empty if no route leads there. Both are in numbers."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # any port
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Whether the address means every machine itself; True also for a text that is no address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True


def interface_with(address: str) -> str:
    """The interface that has the address; empty if none has it."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return (_ipv4_interfaces() if wanted.version == 4 else _ipv6_interfaces()).get(address.partition("%")[0], "")


def _ipv4_interfaces() -> dict[str, str]:
    """Interfaces by their addresses, of which one may have several."""
    entries = array.array("B", bytes(ENTRY_BYTES * MOST_ENTRIES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, LIST_IPV4, struct.pack("iP", len(entries), entries.buffer_info()[0]))
    found = entries.tobytes()[: struct.unpack("iP", answer)[0]]
    return {
        socket.inet_ntoa(found[start + 20 : start + 24]): found[start : start + 16].split(b"\0")[0].decode().partition(":")[0]
        for start in range(0, len(found), ENTRY_BYTES)
    }


def _ipv6_interfaces() -> dict[str, str]:
    lines = [line.split() for line in IPV6_ADDRESSES.read_text(encoding="ascii").splitlines()]
    return {str(ipaddress.IPv6Address(bytes.fromhex(words[0]))): words[-1] for words in lines}


def _key(rank: int) -> str:
    return f"address/{rank}"
