"""Instruments that observe a run: timers, a profiler, a record of memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_zpp.config.flag import spelling_of
from megatron_zpp.config.schema import Config
from megatron_zpp.monitor.observer import Observer, Span, StepObserver
from megatron_zpp.monitor.output import Output
from megatron_zpp.monitor.profiler import MemoryHistory, Profiler, nvtx_span
from megatron_zpp.monitor.timers import Timers, clock_of
from megatron_zpp.system.user_error import UserError


@dataclass(frozen=True)
class Instruments:
    """Instruments of this rank. observer: the engine reports to it; the lanes report to it if observes_hops.

    traces, memory_history: may fail without ending the run.
    """

    timers: Timers
    observer: Observer
    observes_hops: bool = False
    traces: Output[Profiler] | None = None
    memory_history: Output[MemoryHistory] | None = None

    def close(self) -> None:
        """Writes the record of memory, and tells which of the outputs are incomplete."""
        if self.memory_history is not None:
            self.memory_history.attempt(MemoryHistory.close)
            self.memory_history.tell_if_incomplete()
        if self.traces is not None:
            self.traces.tell_if_incomplete()


def make_instruments(config: Config, device: torch.device, rank: int) -> Instruments:
    """Instruments that the flags ask for on this rank. Raises UserError if one of them needs a GPU and there is none."""
    profiling, level = config.profiling, config.logging.timing_log_level
    _check_device(config, device)
    timers = Timers(level, clock_of(device))
    is_profiled = rank in {int(word) for word in profiling.profile_ranks or ("0",)}
    traces, ranges = None, list[Span]()
    if profiling.profile and profiling.profile_dir is not None and is_profiled:
        profiler = Profiler(profiling.profile_step_start, profiling.profile_step_end, Path(profiling.profile_dir), rank)
        traces = Output(f"--profile-dir {profiling.profile_dir}", lambda: profiler, rank)
        ranges.append(profiler.span)
    if profiling.nvtx_ranges:
        ranges.append(nvtx_span)
    phases = (timers.running,) if level > 0 else ()
    observer = StepObserver(phases, tuple(ranges)) if phases or ranges else Observer()
    history = None
    if profiling.record_memory_history and is_profiled:
        path = Path(profiling.memory_snapshot_path)
        if not path.name:
            raise UserError(f"--memory-snapshot-path {path} names no file; give one, such as snapshot.pickle.")
        history = Output(f"--memory-snapshot-path {path}", lambda: MemoryHistory(path, rank), rank)
    return Instruments(timers, observer, observes_hops=level > 1 or bool(ranges), traces=traces, memory_history=history)


def _check_device(config: Config, device: torch.device) -> None:
    for name in ("nvtx_ranges", "record_memory_history"):
        if config.value_of(name) and device.type != "cuda":
            raise UserError(f"{spelling_of(name)} needs a GPU, and this run is on {device.type}; leave it out.")
