"""Makes nodes on one machine: network namespaces joined by a bridge, each over one link whose rate is limited in both directions.

    node 0 [eth0]----[link0]\
                              bridge       eth0 limits what the node sends, link0 what it receives
    node 1 [eth0]----[link1]/

Must be used in a separate network, see sandbox.py: the names are not unique on the machine, and nothing is removed at the end.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from testbed.rates import Rate

INTERFACE = "eth0"
BRIDGE = "switch0"
# After a pause, a token bucket lets one burst pass at full speed. The kernel gives packets of up to 64 kB to the queue; a smaller bucket
# would have to split them.
BURST_BYTES = 70 * 1024
QUEUE_SECONDS = 2  # several nodes may send to one at the same time; if the queue dropped packets, we would measure retransmissions
# Hosts of training clusters have these settings too. A connection that was idle while another lane worked resumes at its old speed, not at
# ten packets. Congestion is detected by losses, of which there are none; BBR would take a token bucket for a fast path. Reno is the one
# algorithm that every kernel lets a namespace choose.
TCP_SETTINGS = ("net.ipv4.tcp_slow_start_after_idle=0", "net.ipv4.tcp_congestion_control=reno")
_COUNTER_COLUMNS = {"received": 0, "sent": 8}


class Network:
    """`nodes` namespaces with one address each. To run a command in a node, put the words of `inside(node)` before it."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        _run("ip link add", BRIDGE, "type bridge")
        _run("ip link set", BRIDGE, "up")
        for node in range(nodes):
            self._add_node(node)

    def _add_node(self, node: int) -> None:
        _run(f"ip netns add node{node}")
        _run(f"ip link add link{node} type veth peer name {INTERFACE} netns node{node}")
        _run(f"ip link set link{node} master {BRIDGE} up")
        for command in (
            "ip link set lo up",
            *(f"sysctl -qw {setting}" for setting in TCP_SETTINGS),
            f"ip address add {self.address(node)}/24 dev {INTERFACE}",
            f"ip link set {INTERFACE} up",
        ):
            _run(*self.inside(node), command)

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def inside(self, node: int) -> list[str]:
        """The words that start a command in this node."""
        return ["nsenter", f"--net=/run/netns/node{node}"]

    def hold(self, rate: Rate) -> None:
        """Limits every link to `rate` in both directions, from the next packet on."""
        for node in range(self.nodes):
            for prefix, device in (([], f"link{node}"), (self.inside(node), INTERFACE)):
                if rate.is_limited:
                    bits = f"{rate.bits_per_second:.0f}bit"
                    _run(*prefix, f"tc qdisc replace dev {device} root tbf rate {bits} burst {BURST_BYTES}b latency {QUEUE_SECONDS}s")
                else:
                    subprocess.run([*prefix, "tc", "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)

    def cut(self, node: int) -> None:
        """Cuts the node's link: nothing enters or leaves the node until `restore`."""
        _run(f"ip link set link{node} down")

    def restore(self, node: int) -> None:
        _run(f"ip link set link{node} up")


def interface_bytes(process_id: int, direction: str = "received") -> int:
    """Bytes that the kernel counted on the node's interface, including headers; process_id: any process in the node."""
    with open(f"/proc/{process_id}/net/dev") as table:
        for line in table:
            name, _, counters = line.partition(":")
            if name.strip() == INTERFACE:
                return int(counters.split()[_COUNTER_COLUMNS[direction]])
    raise RuntimeError(f"process {process_id} has no interface {INTERFACE}")


def _run(*words: str) -> None:
    """Runs a command, given as words or as strings of several words. Raises RuntimeError with its error output if it fails."""
    command: Sequence[str] = [word for piece in words for word in piece.split()]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {finished.stderr.strip()}")
