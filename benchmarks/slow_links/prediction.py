"""Predicts the same steps with plans of time (tools/plan_run.py), given two steps of ZeRO-3: without limit, and at the slowest rate."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.slow_links.configurations import OURS, ZERO3, Workload
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.training.hardware import CPU_CODEC, GLOO_COLLECTIVE_SECONDS, SOCKET
from megatron_zpp.training.members import MEMBERS, PlannedWorld
from megatron_zpp.training.plan.machine import LinkSpeed, Machine, Overlap
from megatron_zpp.training.run_plan import plan_run
from testbed.rates import UNLIMITED, Rate

TCP_SHARE = 1448 / 1514  # share of data in an Ethernet frame; the rest is headers of Ethernet, IP and TCP


@dataclass(frozen=True)
class Known:
    """What predictions are made from. seconds: of ZeRO-3's step at each rate, of which only two are used. cores: that all ranks share."""

    seconds: dict[Rate, float]
    cores: int

    @property
    def slowest(self) -> Rate:
        return min(self.seconds, key=lambda rate: rate.bytes_per_second)


class Prediction:
    """Predicted seconds of our configurations at any rate.

    The step without limit says how long products take. The step at the slowest rate says which share of a link's rate the ranks reach: the
    connections of a node compete for it, and hops wait for the slowest.
    """

    def __init__(self, workload: Workload, known: Known) -> None:
        world = PlannedWorld(workload.nodes, workload.ranks_per_node, is_on_gpu=False)
        given = parse_flags(workload.flags(ZERO3))
        padded = workload.padded_vocab_size
        self._plans = {member.name: plan_run(given, member, world, padded) for member in MEMBERS if member.name in OURS}
        ranks_per_core = max(1.0, workload.world_size / known.cores)
        self._codec, self._socket = CPU_CODEC.times(ranks_per_core), SOCKET.times(ranks_per_core)
        self._flops_per_second, self._share = float("inf"), 1.0
        zero3 = self._plans[ZERO3]
        self._flops_per_second = zero3.flops_per_second(known.seconds[UNLIMITED] - self.seconds(ZERO3, UNLIMITED))
        if known.slowest.is_limited:
            time = zero3.time(self._machine(known.slowest))
            self._share = min(1.0, time.inter_link / (known.seconds[known.slowest] - (time.seconds - time.inter_link)))

    def covers(self, name: str) -> bool:
        """Whether tools/plan_run.py plans this configuration."""
        return name in self._plans

    def seconds(self, name: str, rate: Rate) -> float:
        """Predicted seconds of a step of a configuration that is covered."""
        return self._plans[name].time(self._machine(rate)).seconds

    def _machine(self, rate: Rate) -> Machine:
        constant = GLOO_COLLECTIVE_SECONDS if rate.is_limited else 0.0
        inter = LinkSpeed(rate.bytes_per_second * TCP_SHARE * self._share, constant)
        return Machine(inter, LinkSpeed(float("inf")), self._codec, Overlap.THREAD, self._flops_per_second, socket=self._socket)
