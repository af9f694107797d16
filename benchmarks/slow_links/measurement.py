"""Measures one world: at every rate and in every round, all configurations in turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.slow_links.configurations import FSDP2, SETS, ZERO3, Workload
from benchmarks.slow_links.record import Record
from benchmarks.slow_links.session import Session
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.topology import Link
from megatron_zpp.training.plan.planned_step import plan_step
from megatron_zpp.training.plan.program import Submit
from megatron_zpp.training.sharding import grid_of
from testbed.network import BURST_BYTES
from testbed.rates import UNLIMITED, Rate

FEWEST_BURSTS = 10
LEAST_SHARE_OF_UNIT = 0.01  # the final norm's few kilobytes may pass in a burst, because their time is negligible
LARGEST_RATE_ERROR = 0.10
LONG_PROBE_SECONDS = 0.25
# Default rates: at the first three, the bytes of ZeRO-3's step take this many times its computation (at 4.5, f is about 0.8). At the last,
# FSDP2's step takes 20 times its step without limit.
ZERO3_LINK_SHARES = (1.0, 2.0, 4.5)
FSDP2_LINK_SHARE = 19.5


@dataclass(frozen=True)
class Plan:
    """What to measure.

    names: the configurations. rates: None to choose them after the first rounds without limit. seconds: approximate, of one measurement.
    """

    names: Sequence[str]
    rates: Sequence[Rate] | None
    rounds: int
    seconds: float
    is_profiled: bool


def smallest_hop(workload: Workload) -> int:
    """Bytes that enter a node in the smallest hop of a unit that matters, of both sets of ZeRO++.

    Raises ValueError if a burst would carry a large part of it.
    """
    nbytes = min(smallest_hop_of(name, workload) for name in SETS)
    if nbytes < FEWEST_BURSTS * BURST_BYTES:
        raise ValueError(
            f"the smallest hop between nodes brings {nbytes} bytes into one, less than {FEWEST_BURSTS} bursts of {BURST_BYTES}, which pass "
            "at any rate after a pause; choose a larger --hidden-size in --model."
        )
    return nbytes


def smallest_hop_of(name: str, workload: Workload) -> int:
    """Bytes that enter a node in the smallest hop of a unit that matters, of one configuration."""
    config = resolve(parse_flags(workload.flags(name)), workload.world_size, workload.ranks_per_node)
    specs = ModelShape(config.model, workload.padded_vocab_size).unit_specs()
    numel = {unit.name: sum(math.prod(param.shape) for param in unit.params) for unit in specs}
    units = {unit for unit, own in numel.items() if own >= LEAST_SHARE_OF_UNIT * sum(numel.values())}
    grid = grid_of(config, workload.world_size)
    items = plan_step(config, grid, workload.padded_vocab_size, is_on_gpu=False).items(1)
    hops = [item for item in items if isinstance(item, Submit) and item.lane.link is Link.INTER and item.unit in units]
    return grid.into_node(min(hop.traffic.inter_bytes for hop in hops))


def measure(session: Session, workload: Workload, plan: Plan, record: Record) -> None:
    """Measures the rounds that are missing in the record; writes every round when it is finished."""
    record.note("intra_node_leak_bytes", session.check_nodes_keep_to_themselves())
    hop_bytes = smallest_hop(workload)
    record.note("smallest_hop_bytes", hop_bytes)
    if plan.rates is None:
        _measure_rate(session, UNLIMITED, plan, record, hop_bytes)
        rates: Sequence[Rate] = chosen_rates(record)
    else:
        rates = plan.rates
    for rate in rates:
        _measure_rate(session, rate, plan, record, hop_bytes)


def chosen_rates(record: Record) -> list[Rate]:
    """Rates at which the bytes of a step take several times as long as its computation. The record keeps them once they are chosen."""
    kept = record.content["notes"].get("chosen_rates")
    if kept is None:
        rounds = record.rounds(UNLIMITED)
        kept = [str(_rate_for(rounds, ZERO3, share)) for share in ZERO3_LINK_SHARES]
        kept.append(str(_rate_for(rounds, FSDP2, FSDP2_LINK_SHARE)))
        record.note("chosen_rates", kept)
    return [Rate.parse(text) for text in kept]


def _rate_for(rounds: Sequence[dict[str, Any]], name: str, link_share: float) -> Rate:
    """The rate, rounded to two digits, at which the bytes of a step take `link_share` times its time without limit."""
    seconds = statistics.median(measured[name]["seconds"] for measured in rounds)
    nbytes = statistics.median(measured[name]["kernel_bytes"] for measured in rounds)
    return Rate(float(f"{8 * nbytes / (link_share * seconds):.2g}"))


def _measure_rate(session: Session, rate: Rate, plan: Plan, record: Record, hop_bytes: int) -> None:
    if len(record.rounds(rate)) >= plan.rounds:
        print(f"{rate}: {len(record.rounds(rate))} rounds are there", flush=True)
        return
    session.network.hold(rate)
    if rate.is_limited:
        record.note(f"achieved at {rate}", _check_rate(session, rate, hop_bytes))
    for index in range(len(record.rounds(rate)), plan.rounds):
        names = plan.names if index % 2 == 0 else tuple(reversed(plan.names))
        measured = {}
        for name in names:
            measured[name] = session.run(name, plan.seconds, is_profiled=plan.is_profiled).as_json()
            print(f"{rate}, round {index + 1}: {name} {measured[name]['seconds'] * 1e3:.0f} ms per step", flush=True)
        record.add_round(rate, measured)


def _check_rate(session: Session, rate: Rate, hop_bytes: int) -> dict[str, float]:
    """The measured rates of a message as large as the smallest hop and of a longer one. Raises RuntimeError if one differs from `rate`."""
    achieved = {}
    for nbytes in (hop_bytes, max(hop_bytes, int(LONG_PROBE_SECONDS * rate.bytes_per_second))):
        reached = session.achieved(nbytes)
        achieved[f"{nbytes} bytes"] = reached.bits_per_second
        print(f"{rate}: {nbytes} bytes after a pause go at {reached}", flush=True)
        if abs(reached.bits_per_second / rate.bits_per_second - 1) > LARGEST_RATE_ERROR:
            raise RuntimeError(
                f"the link held to {rate} carries {nbytes} bytes at {reached}, more than {LARGEST_RATE_ERROR:.0%} off; "
                "is the machine busy? Give a lower --rate, or a larger --hidden-size in --model."
            )
    return achieved
