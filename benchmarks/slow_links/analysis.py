"""Computes speedups from the measured rounds, and compares them with the speedups that fewer bytes alone would allow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.slow_links.configurations import FSDP2, NAMES, OURS, PEERS, ZERO3, Workload
from benchmarks.slow_links.record import Record
from testbed.rates import UNLIMITED, Rate

Round = dict[str, Any]  # by configuration, a measurement as JSON


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum over rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One configuration at one rate. Speedups are medians of ratios within a round, where both ran side by side.

    in_models: kernel_bytes in units of M (N - 1)/N, the model in 16 bits times the share that comes from other nodes.
    allowed: the speedup over ZeRO-3 that fewer bytes alone would give, 1 / ((1 - f) + f * bytes ratio); None without a limit of the rate.
    """

    name: str
    seconds: Spread
    tokens_per_second: float
    over_zero3: float
    over_fsdp2: float
    kernel_bytes: float
    in_models: float
    ledger_bytes: float | None
    control_bytes: float | None
    allowed: float | None
    hidden: dict[str, float]

    @property
    def reached(self) -> float | None:
        """The speedup divided by the allowed speedup."""
        return None if self.allowed is None else self.over_zero3 / self.allowed

    @property
    def kernel_over_ledger(self) -> float | None:
        """Bytes that the kernel counted beyond the ledger's, divided by the ledger's: headers, acknowledgements, the store's messages."""
        if self.ledger_bytes is None or self.control_bytes is None:
            return None
        return self.kernel_bytes / (self.ledger_bytes + self.control_bytes) - 1


@dataclass(frozen=True)
class Rated:
    """All configurations at one rate.

    f: share of ZeRO-3's step that links cost. ring_seconds: of each peer, its step if its reduce-scatter moved only the necessary bytes.
    """

    rate: Rate
    f: float | None
    ring_seconds: dict[str, float]
    rows: dict[str, Row]

    @property
    def fsdp2_3m_seconds(self) -> float:
        """FSDP2's step with 3M."""
        return self.ring_seconds[FSDP2]

    def gain_by_part(self, name: str) -> dict[str, float]:
        """The factors whose product is the speedup of `name` over FSDP2."""
        fsdp2, zero3 = self.rows[FSDP2].seconds.median, self.rows[ZERO3].seconds.median
        return {
            "exchange instead of gloo's reduce-scatter": fsdp2 / self.fsdp2_3m_seconds,
            "two hops, overlap and engine": self.fsdp2_3m_seconds / zero3,
            "quantization and secondary copies": zero3 / self.rows[name].seconds.median,
        }


def analyse(record: Record, workload: Workload) -> list[Rated]:
    """One entry per rate, the fastest first. Without rounds at an unlimited rate f is None, and so is all that follows from it."""
    unlimited = record.rounds(UNLIMITED)
    return [_rated(rate, record, workload, unlimited) for rate in record.rates]


def _rated(rate: Rate, record: Record, workload: Workload, unlimited: Sequence[Round]) -> Rated:
    rounds = record.rounds(rate)
    f = None
    if unlimited and rate.is_limited:
        f = max(0.0, 1 - _median(unlimited, ZERO3, "seconds") / _median(rounds, ZERO3, "seconds"))
    rows = {name: _row(name, rounds, workload, f) for name in NAMES if name in rounds[0]}
    return Rated(
        rate, f, {name: _ring_seconds(name, rate, workload, rows[name], unlimited) for name in PEERS.values() if name in rows}, rows
    )


def _ring_seconds(name: str, rate: Rate, workload: Workload, row: Row, unlimited: Sequence[Round]) -> float:
    """The peer's step without the bytes that gloo's reduce-scatter moves beyond a ring's; at least its step without limit."""
    seconds = row.seconds.median
    least = _median(unlimited, name, "seconds") if unlimited else 0.0
    return max(min(least, seconds), seconds - bytes_spared_by_ring(workload) / rate.bytes_per_second)


def bytes_spared_by_ring(workload: Workload) -> float:
    """Bytes into a node that a peer would not move if gloo's reduce-scatter were a ring: (W - 1) / W of the model per micro-batch."""
    world_size = workload.world_size
    return workload.microbatches * 2 * workload.parameters * (world_size - 1) / world_size


def _row(name: str, rounds: Sequence[Round], workload: Workload, f: float | None) -> Row:
    seconds = Spread.of([measured[name]["seconds"] for measured in rounds])
    bytes_ratio = _median(rounds, name, "kernel_bytes") / _median(rounds, ZERO3, "kernel_bytes")
    has_ledger = rounds[0][name]["ledger_bytes"] is not None
    kinds = {kind for measured in rounds for kind in measured[name]["hidden"]}
    return Row(
        name=name,
        seconds=seconds,
        tokens_per_second=workload.tokens_per_step / seconds.median,
        over_zero3=ratio_of_seconds(rounds, ZERO3, name),
        over_fsdp2=ratio_of_seconds(rounds, FSDP2, name),
        kernel_bytes=_median(rounds, name, "kernel_bytes"),
        in_models=_median(rounds, name, "kernel_bytes") / workload.model_share_bytes,
        ledger_bytes=_median(rounds, name, "ledger_bytes") if has_ledger else None,
        control_bytes=_median(rounds, name, "control_bytes") if has_ledger else None,
        allowed=None if f is None or name not in OURS else 1 / ((1 - f) + f * bytes_ratio),
        hidden={kind: _median_hidden(rounds, name, kind) for kind in sorted(kinds)},
    )


def _median_hidden(rounds: Sequence[Round], name: str, kind: str) -> float:
    return _median_of(rounds, lambda measured: measured[name]["hidden"].get(kind, 0.0))


def ratio_of_seconds(rounds: Sequence[Round], name: str, other: str) -> float:
    """The step of `name` over that of `other`: the median over rounds, in which both ran side by side."""
    return _median_of(rounds, lambda measured: measured[name]["seconds"] / measured[other]["seconds"])


def _median(rounds: Sequence[Round], name: str, key: str) -> float:
    return _median_of(rounds, lambda measured: measured[name][key])


def _median_of(rounds: Sequence[Round], value: Callable[[Round], float]) -> float:
    return statistics.median(value(measured) for measured in rounds)
