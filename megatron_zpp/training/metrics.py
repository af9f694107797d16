"""Sums over the iterations between two training lines, and the report that is made from them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.comm.ledger import Category, Ledger, Traffic
from megatron_zpp.config.schema import Config
from megatron_zpp.model.flops import hardware_flops, model_flops
from megatron_zpp.monitor.interval_report import IntervalReport
from megatron_zpp.monitor.memory import MemoryReading
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.sharding import world_size_of
from megatron_zpp.training.step import StepOutcome


class StepTimes(NamedTuple):
    """Duration of one iteration of `samples` samples on this rank. data_seconds: part of it spent waiting for micro-batches."""

    samples: int
    seconds: float
    data_seconds: float


class Stopwatch:
    """Measures iterations, each from the end of the one before. A device still works on an iteration that the host has ended.

    So what lies between two iterations counts, for the later one. It may wait for the device, as timers do.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, without those that were paused."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the block out of the lap, and with it what the device still does meanwhile."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began


@dataclass
class Interval:
    """Sums over the iterations since the last report."""

    losses: list[float] = field(default_factory=list)  # of steps that were not skipped
    samples: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0  # part of them, waiting for micro-batches
    inter_node_bytes: int = 0  # into one node from others, over all links
    iterations: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0

    def add(self, outcome: StepOutcome, times: StepTimes, inter_node_bytes: int) -> None:
        self.samples += times.samples
        self.seconds += times.seconds
        self.data_seconds += times.data_seconds
        self.inter_node_bytes += inter_node_bytes
        self.iterations += 1
        self.skipped_iterations += outcome.is_skipped
        self.nan_iterations += not math.isfinite(outcome.lm_loss)
        if not outcome.is_skipped:
            self.losses.append(outcome.lm_loss)

    def mean_loss(self, latest: StepOutcome) -> float:
        """Mean loss of the steps that were not skipped. If all were skipped, the latest loss, which may be NaN."""
        return sum(self.losses) / len(self.losses) if self.losses else latest.lm_loss


class StepTraffic:
    """The bytes that this rank received in the latest step, by the ledger: over its ladder, the tensor and context link, from islands."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._before = Traffic()
        self.latest = Traffic()

    def close_step(self) -> None:
        total = self._ledger.total(
            Category.WEIGHTS, Category.GRADIENTS, Category.ACTIVATIONS, Category.EXCHANGES, Category.REPLICAS, Category.OUTER
        )
        self.latest = total - self._before
        self._before = total

    @property
    def grid(self) -> Grid:
        """That of the world, or of an island."""
        return self._ledger.grid

    @property
    def inter_node_bytes(self) -> int:
        return self._ledger.inter_node_bytes(self.latest)

    @property
    def context_inter_node_bytes(self) -> int:
        return self._ledger.context_inter_node_bytes(self.latest)


@dataclass(frozen=True)
class StepReadings:
    """Result and rates of the latest step. loss_scale: of the next step."""

    outcome: StepOutcome
    global_batch_size: int
    learning_rate: float
    loss_scale: float


@dataclass(frozen=True)
class ReportInputs:
    """Inputs of a report that are not sums. peak_tflops: of one device, None if unknown. params_norm: None without --log-params-norm."""

    latest: StepReadings
    padded_vocab_size: int
    memory: MemoryReading
    peak_tflops: float | None = None
    params_norm: float | None = None


def interval_report(config: Config, progress: Progress, interval: Interval, inputs: ReportInputs, traffic: StepTraffic) -> IntervalReport:
    """Report of the interval that ends with the current iteration."""
    samples = interval.samples / interval.iterations
    seconds = interval.seconds / interval.iterations
    world_size = world_size_of(config, traffic.grid)
    model, vocabulary = config.model, inputs.padded_vocab_size
    made = hardware_flops(
        model,
        vocabulary,
        interval.samples,
        micro_batch_size=config.training.micro_batch_size,
        context_ranks=config.distributed.context_parallel_size,
    )
    required = model_flops(model, vocabulary, interval.samples)
    per_second_of_rank = 1.0 / (interval.seconds * world_size * 1e12)
    return IntervalReport(
        iteration=progress.iteration,
        train_iters=config.training.train_iters,
        interval_iterations=interval.iterations,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_tokens,
        global_batch_size=inputs.latest.global_batch_size,
        samples_per_iteration=samples,
        seq_length=config.model.seq_length,
        world_size=world_size,
        elapsed_ms_per_iteration=seconds * 1000.0,
        data_ms_per_iteration=interval.data_seconds / interval.iterations * 1000.0,
        learning_rate=inputs.latest.learning_rate,
        lm_loss=interval.mean_loss(inputs.latest.outcome),
        loss_scale=inputs.latest.loss_scale,
        grad_norm=inputs.latest.outcome.grad_norm,
        skipped_iterations=interval.skipped_iterations,
        nan_iterations=interval.nan_iterations,
        tflops_per_gpu=made * per_second_of_rank,
        model_tflops_per_gpu=required * per_second_of_rank,
        inter_node_bytes=traffic.inter_node_bytes,
        inter_node_bytes_per_iteration=interval.inter_node_bytes / interval.iterations,
        intra_node_bytes=traffic.latest.intra_bytes,
        tensor_link_bytes=traffic.latest.tensor_bytes,
        context_link_bytes=traffic.latest.context_bytes,
        context_inter_node_bytes=traffic.context_inter_node_bytes,
        model_state_bytes=inputs.latest.outcome.model_state_bytes,
        memory=inputs.memory,
        peak_tflops=inputs.peak_tflops,
        params_norm=inputs.params_norm,
        num_zeros=inputs.latest.outcome.num_zeros,
        host_state_bytes=inputs.latest.outcome.host_state_bytes,
    )
