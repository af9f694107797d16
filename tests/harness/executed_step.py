"""What one training step of a run really executes: files of the package, and the way from a hook to its collective."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import megatron_zpp
from harness.tiny_runs import entry

PACKAGE = f"{Path(megatron_zpp.__file__).parent}/"
TRACED_STEP = 3  # the first ones allocate what later ones use again

Chain = tuple[str, ...]  # `file:function` of each frame of the package, outermost first


@dataclass
class ExecutedStep:
    """files: below the package. to_lane: from hooks to the submission of a hop. to_collective: on the thread of the lanes."""

    files: set[str] = field(default_factory=set)
    to_lane: set[Chain] = field(default_factory=set)
    to_collective: set[Chain] = field(default_factory=set)

    def on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        self.files.add(_file(frame))
        name = f"{_file(frame)}:{frame.f_code.co_name}"
        if name == "comm/lanes.py:submit":
            chain = _chain(frame)
            first = max((place for place, name in enumerate(chain) if name.startswith("zero/hooks.py:")), default=None)
            if first is not None:
                self.to_lane.add(chain[first:])
        elif name in ("comm/backend.py:all_gather", "comm/backend.py:exchange"):
            self.to_collective.add(_chain(frame))


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(PACKAGE)


def _chain(frame: FrameType | None) -> Chain:
    frames = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            frames.append(f"{_file(frame)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(frames))


def executed_step(flags: list[str]) -> ExecutedStep:
    """Runs the entry on this rank, which makes at least TRACED_STEP steps."""
    from megatron_zpp.training import startup_checks
    from megatron_zpp.training.trainer import Trainer

    executed, steps, train_step = ExecutedStep(), 0, Trainer._train_step
    is_traced, of_step = False, threading.current_thread()

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        # Other threads, such as that of the pulse, are no part of a step.
        thread = threading.current_thread()
        if is_traced and (thread is of_step or thread.name == "lanes"):
            executed.on_event(frame, event, argument)

    def traced(self: Trainer, *arguments: Any) -> Any:
        nonlocal steps, is_traced
        steps += 1
        is_traced = steps == TRACED_STEP
        sys.setprofile(on_event if is_traced else None)
        try:
            return train_step(self, *arguments)
        finally:
            is_traced = False
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", traced)
        patch.setattr(startup_checks, "check_memory", lambda *arguments: None)  # the plan is made of steps, too
        threading.setprofile(on_event)  # of the thread of the lanes, which is not there yet
        try:
            assert entry(flags) == 0
        finally:
            threading.setprofile(None)
    return executed
