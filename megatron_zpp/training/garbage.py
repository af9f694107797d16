"""Collection of Python's garbage: by Python's thresholds, or at the same moments on every rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from megatron_zpp.config.schema import TrainingConfig


class GarbageCollection:
    """Context in which, under --manual-gc, garbage is collected by the methods alone: a rank that collects by itself delays all others."""

    def __init__(self, training: TrainingConfig) -> None:
        self._is_manual = training.manual_gc
        self._interval = training.manual_gc_interval if training.manual_gc else 0
        self._collects_at_evaluations = training.manual_gc and not training.no_manual_gc_eval

    def __enter__(self) -> GarbageCollection:
        if self._is_manual:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._is_manual:
            gc.enable()

    def after_iteration(self, iteration: int) -> None:
        """Collects every --manual-gc-interval iterations. Call it after every iteration."""
        if self._interval and iteration % self._interval == 0:
            gc.collect()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Collects before and after an evaluation. Put it around every evaluation."""
        if self._collects_at_evaluations:
            gc.collect()
        yield
        if self._collects_at_evaluations:
            gc.collect()
