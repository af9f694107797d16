"""Writes Chrome traces of a few iterations with named units, hops and phases, and a record of allocations on the GPU."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import autograd
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_zpp.monitor.observer import StepObserver
from megatron_zpp.system.output_file import new_file

LARGEST_ENTRIES = 1_000_000  # how many of the latest allocations and frees are kept; each costs a few hundred bytes of host memory

# A unit's backward begins inside one autograd node and ends inside another. Such ranges overlap without nesting and need a separate row.
_RANGE = '"cat": "user_annotation"'
_UNIT_NAME = re.compile(r'"name": "(?:forward|backward) ')
_ROW = re.compile(r'("tid": )\d+')
_ROW_OF_UNITS = r'\1"units"'


class Profiler:
    """Profiles iterations `start` to `end` - 1 of this process, counted from 0, on this rank; writes one trace to `directory`."""

    def __init__(self, start: int, end: int, directory: Path, rank: int) -> None:
        self._start = start
        self._end = end
        self._directory = directory
        self._rank = rank
        self._made = 0
        self._profile: profile | None = None
        self._first_iteration = 0

    def span(self, name: str) -> AbstractContextManager[object]:
        """A named range in the trace; does nothing while no profile is running."""
        return nullcontext() if self._profile is None else record_function(name)

    def before_step(self, iteration: int) -> str:
        """Starts or ends the profile; must be called before each iteration, with its number. Returns a line if it wrote the trace."""
        said = self.finish(iteration - 1) if self._made == self._end else ""
        if self._made == self._start:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._first_iteration = iteration
            self._profile = profile(activities=activities, record_shapes=True, experimental_config=all_threads())
            self._profile.start()
        self._made += 1
        return said

    def finish(self, last_iteration: int) -> str:
        """Writes the trace up to `last_iteration` and returns a line with its path; an empty string if no profile is running."""
        if self._profile is None:
            return ""
        running, self._profile = self._profile, None
        running.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"iterations_{self._first_iteration}-{last_iteration}_rank_{self._rank}.pt.trace.json"
        running.export_chrome_trace(str(path))
        move_units_to_a_row(path)
        return f"profile of iterations {self._first_iteration} to {last_iteration} on rank {self._rank}: {path}"


def is_profiled() -> bool:
    """Whether torch's profiler runs, whoever has started it."""
    return bool(autograd.profiler._is_profiler_enabled)


def label(name: str) -> AbstractContextManager[object]:
    """A named range in the trace of torch's profiler; does nothing while none runs."""
    return record_function(name) if is_profiled() else nullcontext()


class LabelObserver(StepObserver):
    """Names phases, hops and units in the traces of a program that runs torch's profiler itself. Without one they cost next to nothing."""

    def __init__(self) -> None:
        super().__init__((), (label,))

    @property
    def is_on(self) -> bool:
        return is_profiled()


def all_threads() -> _ExperimentalConfig | None:
    """The option to profile the thread of the lanes too; None for torch 2.6, which profiles only the calling thread."""
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


@contextmanager
def nvtx_span(name: str) -> Iterator[None]:
    """A range for Nsight Systems. It is not pushed and popped, because it may end in another thread than it began in."""
    handle = torch.cuda.nvtx.range_start(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_end(handle)


def move_units_to_a_row(trace: Path) -> None:
    """Moves the ranges of units in a Chrome trace to a row named `units`. Rewrites the file line by line, because it may be large."""
    moved = trace.with_suffix(".part")
    with trace.open(encoding="utf-8") as source, io.TextIOWrapper(new_file(moved), encoding="utf-8") as target:
        target.writelines(_with_rows_of_units(source))
    os.replace(moved, trace)


def _with_rows_of_units(lines: Iterable[str]) -> Iterator[str]:
    """The lines with ranges of units moved. An event has one line or several, in the order category, name, row."""
    is_range = is_unit = False
    for line in lines:
        is_range = is_range or _RANGE in line
        is_unit = is_unit or (is_range and _UNIT_NAME.search(line) is not None)
        yield _ROW.sub(_ROW_OF_UNITS, line) if is_unit else line
        if '"tid":' in line:
            is_range = is_unit = False


class MemoryHistory:
    """Records allocations from now on. `close` writes a snapshot for pytorch.org/memory_viz; that works even when memory is exhausted."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path.with_name(f"{path.stem}_rank_{rank}{path.suffix}")
        torch.cuda.memory._record_memory_history(max_entries=LARGEST_ENTRIES)

    def close(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)  # a link of this name would be written through
        torch.cuda.memory._dump_snapshot(str(self._path))
        torch.cuda.memory._record_memory_history(enabled=None)
