"""Instruments that observe a run: timers, a profiler, a record of memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_zpp.config.schema import Config
from megatron_zpp.monitor.observer import Observer, Span, StepObserver
from megatron_zpp.monitor.profiler import MemoryHistory, Profiler, nvtx_span
from megatron_zpp.monitor.timers import Timers, clock_of


@dataclass(frozen=True)
class Instruments:
    """Instruments of this rank. observer: the engine reports to it; the lanes report to it if observes_hops."""

    timers: Timers
    observer: Observer
    observes_hops: bool = False
    profiler: Profiler | None = None
    memory_history: MemoryHistory | None = None

    def close(self) -> None:
        """Writes the record of memory."""
        if self.memory_history is not None:
            self.memory_history.close()


def make_instruments(config: Config, device: torch.device, rank: int) -> Instruments:
    """Instruments that the flags ask for on this rank. Raises ValueError if one of them needs a GPU and there is none."""
    profiling, level = config.profiling, config.logging.timing_log_level
    _check_device(config, device)
    timers = Timers(level, clock_of(device))
    is_profiled = rank in {int(word) for word in profiling.profile_ranks or ("0",)}
    profiler, ranges = None, list[Span]()
    if profiling.profile and profiling.profile_dir is not None and is_profiled:
        profiler = Profiler(profiling.profile_step_start, profiling.profile_step_end, Path(profiling.profile_dir), rank)
        ranges.append(profiler.span)
    if profiling.nvtx_ranges:
        ranges.append(nvtx_span)
    phases = (timers.running,) if level > 0 else ()
    observer = StepObserver(phases, tuple(ranges)) if phases or ranges else Observer()
    history = MemoryHistory(Path(profiling.memory_snapshot_path), rank) if profiling.record_memory_history and is_profiled else None
    return Instruments(timers, observer, observes_hops=level > 1 or bool(ranges), profiler=profiler, memory_history=history)


def _check_device(config: Config, device: torch.device) -> None:
    for name in ("nvtx_ranges", "record_memory_history"):
        if config.value_of(name) and device.type != "cuda":
            raise ValueError(f"--{name.replace('_', '-')} needs a GPU, and this run is on {device.type}; leave it out.")
