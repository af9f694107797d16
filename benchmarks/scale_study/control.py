"""Bytes of a gather of numbers that enter a node: what the kernel counts on nodes that are network namespaces, and the ledger's form."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.parallel.gathers import rounds
from megatron_zpp.parallel.grid import Grid
from testbed.network import Network
from testbed.network_ranks import printed_by_ranks

NUMBERS = 6  # of a step whose losses are logged: three of the norm, the loss, what stops a run, and the checksum of the samples
CALLS = 100
WORLDS = ((2, 1), (2, 2), (2, 4), (3, 2), (4, 1), (4, 2), (8, 1))
LONGEST_SECONDS = 300.0


@dataclass(frozen=True)
class Control:
    """Bytes that enter a node in a gather. payload: by the ledger. levels: measured, headers included. ring: of all ranks, measured."""

    nodes: int
    ranks_per_node: int
    payload: int
    levels: float
    ring: float

    @property
    def rounds(self) -> int:
        """Messages between nodes that a rank waits for, one after the other."""
        return rounds(self.nodes)


def measure() -> list[Control]:
    """Of every world of WORLDS. This process must have a network of its own."""
    network = Network(max(nodes for nodes, _ in WORLDS))
    return [measured(network, *world, port) for port, world in zip(range(29500, 29600), WORLDS, strict=False)]


def measured(network: Network, nodes: int, ranks_per_node: int, port: int) -> Control:
    command = [sys.executable, "-m", "benchmarks.scale_study.control_rank", *map(str, (ranks_per_node, NUMBERS, CALLS))]
    printed = printed_by_ranks(network, (nodes, ranks_per_node), port, lambda node: command, LONGEST_SECONDS)
    levels, ring = json.loads(printed[0].splitlines()[-1])
    return Control(nodes, ranks_per_node, payload_into_node(nodes, ranks_per_node), levels, ring)


def payload_into_node(nodes: int, ranks_per_node: int, numbers: int = NUMBERS) -> int:
    """Bytes of a gather of fp64 numbers that enter a node, by the ledger."""
    ledger = Ledger(Grid.of_nodes(nodes, ranks_per_node), 0)
    return ledger.inter_node_bytes(ledger.measure_world(8 * numbers))
