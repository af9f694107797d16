"""What the time model of tools/plan_run.py says of the same steps, from ZeRO-3's step without limit alone."""

from __future__ import annotations

import os

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.training.hardware import CPU_CODEC, GLOO_COLLECTIVE_SECONDS
from megatron_zpp.training.run_plan import MEMBERS, PlannedWorld, computation_by_step, plan_run
from megatron_zpp.zero.plan.time_model import CodecSpeed, LinkSpeed, Machine, Overlap
from slow_links.configurations import NAMES, ZERO3, Workload
from slow_links.rates import Rate

TCP_SHARE = 1448 / 1514  # of what a link carries is payload: an Ethernet frame of 1500 bytes holds headers of IP and TCP, and has its own


class Prediction:
    """Predicted seconds of our configurations at any rate.

    step_seconds: ZeRO-3's without limit; what links inside a node cost is in it.
    """

    def __init__(self, workload: Workload, step_seconds: float) -> None:
        world = PlannedWorld(workload.nodes, workload.ranks_per_node, is_on_gpu=False)
        given = parse_flags(workload.flags(ZERO3))
        padded = workload.padded_vocab_size
        self._plans = {member.name: plan_run(given, member, world, padded) for member in MEMBERS if member.name in NAMES}
        self._computation = computation_by_step(self._plans[ZERO3].config, padded, step_seconds, workload.microbatches)
        ranks_per_core = max(1.0, workload.world_size / (os.cpu_count() or 1))
        self._codec = CodecSpeed(*(ranks_per_core * seconds for seconds in (CPU_CODEC.encode, CPU_CODEC.decode, CPU_CODEC.summed)))

    def seconds(self, name: str, rate: Rate) -> float | None:
        """None for what is not ours."""
        if name not in self._plans:
            return None
        inter = LinkSpeed(rate.bytes_per_second * TCP_SHARE, GLOO_COLLECTIVE_SECONDS if rate.is_limited else 0.0)
        machine = Machine(inter, LinkSpeed(float("inf")), self._codec, Overlap.THREAD)
        return self._plans[name].time(machine, self._computation).seconds
