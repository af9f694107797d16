"""Predicts the same steps with the time model of tools/plan_run.py, given only ZeRO-3's step time without limit."""

from __future__ import annotations

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.training.hardware import CPU_CODEC, GLOO_COLLECTIVE_SECONDS, SOCKET
from megatron_zpp.training.members import MEMBERS, PlannedWorld
from megatron_zpp.training.plan.machine import LinkSpeed, Machine, Overlap
from megatron_zpp.training.run_plan import plan_run
from slow_links.configurations import OURS, ZERO3, Workload
from slow_links.rates import UNLIMITED, Rate

TCP_SHARE = 1448 / 1514  # share of data in an Ethernet frame; the rest is headers of Ethernet, IP and TCP


class Prediction:
    """Predicted seconds of our configurations at any rate.

    step_seconds: ZeRO-3's step without limit. cores: that all ranks share.
    """

    def __init__(self, workload: Workload, step_seconds: float, cores: int) -> None:
        world = PlannedWorld(workload.nodes, workload.ranks_per_node, is_on_gpu=False)
        given = parse_flags(workload.flags(ZERO3))
        padded = workload.padded_vocab_size
        self._plans = {member.name: plan_run(given, member, world, padded) for member in MEMBERS if member.name in OURS}
        ranks_per_core = max(1.0, workload.world_size / cores)
        self._codec, self._socket = CPU_CODEC.times(ranks_per_core), SOCKET.times(ranks_per_core)
        beside_products = self._plans[ZERO3].time(self._machine(UNLIMITED, float("inf"))).seconds
        self._flops_per_second = self._plans[ZERO3].flops_per_second(step_seconds - beside_products)

    def covers(self, name: str) -> bool:
        """Whether tools/plan_run.py plans this configuration."""
        return name in self._plans

    def seconds(self, name: str, rate: Rate) -> float:
        """Predicted seconds of a step of a configuration that is covered."""
        return self._plans[name].time(self._machine(rate, self._flops_per_second)).seconds

    def _machine(self, rate: Rate, flops_per_second: float) -> Machine:
        inter = LinkSpeed(rate.bytes_per_second * TCP_SHARE, GLOO_COLLECTIVE_SECONDS if rate.is_limited else 0.0)
        return Machine(inter, LinkSpeed(float("inf")), self._codec, Overlap.THREAD, flops_per_second, socket=self._socket)
