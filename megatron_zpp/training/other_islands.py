"""What an island of a run learns of the others, now and then: a message in every step would wait for the slow link between them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_zpp.comm.links import Links
from megatron_zpp.comm.waits import WATCH_SECONDS
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.training.metrics import Interval, ReportInputs
from megatron_zpp.training.stop_conditions import StopRequest


class _Told(NamedTuple):
    """What islands tell each other for a report, a number of each. What a run does not count is 0."""

    loss_sum: Sequence[float]
    losses: Sequence[float]
    skipped_iterations: Sequence[float]
    nan_iterations: Sequence[float]
    loss_scale: Sequence[float]
    lm_loss: Sequence[float]
    grad_norm: Sequence[float]
    num_zeros: Sequence[float]
    params_norm: Sequence[float]


class OtherIslands:
    """The islands of a run as one of them sees them between steps. outer: None in a run without islands, where nothing crosses.

    Every rank of every island must make the same calls.
    """

    def __init__(self, outer: OuterSteps | None) -> None:
        self._outer = outer
        self._noted = StopRequest.NONE
        self._looked = -math.inf

    def requests(self, own: StopRequest, iteration: int) -> StopRequest:
        """The stop requests that every island knows of after this iteration, and an error if a rank of any island has failed.

        own: those of this island, which are told when a period ends, and after every iteration in which islands take means.
        """
        if self._outer is None:
            return own
        self._look_for_failures(self._outer.links)
        self._noted |= own
        options = self._outer.options
        if iteration % options.period != 0 and not options.takes_means(iteration):
            return StopRequest.NONE
        return StopRequest.of_ranks(request for (request,) in _of_islands(self._outer.links, [self._noted]))

    def _look_for_failures(self, column: Links) -> None:
        """Raises RuntimeError if a rank of any island has failed. By itself an island would learn of it at its next exchange."""
        now = time.monotonic()
        if column.waits.watch is not None and now - self._looked >= WATCH_SECONDS:
            column.waits.watch()
            self._looked = now


def of_all_islands(interval: Interval, inputs: ReportInputs, outer: OuterSteps | None) -> tuple[Interval, ReportInputs]:
    """What a report says, with the numbers of all islands: means of losses and counts of zeros, root mean squares of norms.

    outer: None in a run without islands. Every rank of every island must call it.
    Iterations that were skipped or had no finite loss are those of the island that has the most, and the loss scale is the smallest.
    """
    if outer is None:
        return interval, inputs
    outcome, counts = inputs.latest.outcome, (interval.skipped_iterations, interval.nan_iterations)
    own = (sum(interval.losses), len(interval.losses), *counts, inputs.latest.loss_scale, outcome.lm_loss, outcome.grad_norm)
    rows = _of_islands(outer.links, [*own, outcome.num_zeros or 0, inputs.params_norm or 0.0])
    told = _Told(*zip(*rows, strict=True))
    outcome = replace(
        outcome,
        lm_loss=sum(told.lm_loss) / len(rows),
        grad_norm=_root_mean_square(told.grad_norm),
        num_zeros=None if outcome.num_zeros is None else round(sum(told.num_zeros) / len(rows)),
    )
    return (
        replace(
            interval,
            losses=[sum(told.loss_sum) / sum(told.losses)] if any(told.losses) else [],
            skipped_iterations=int(max(told.skipped_iterations)),
            nan_iterations=int(max(told.nan_iterations)),
        ),
        replace(
            inputs,
            latest=replace(inputs.latest, outcome=outcome, loss_scale=min(told.loss_scale)),
            params_norm=None if inputs.params_norm is None else _root_mean_square(told.params_norm),
        ),
    )


def _of_islands(column: Links, own: Sequence[float]) -> list[list[float]]:
    """`own` of every island."""
    rows: list[list[float]] = column.gather_world(torch.tensor(own, dtype=torch.float64, device=column.device)).flatten(0, 1).tolist()
    return rows


def _root_mean_square(numbers: Sequence[float]) -> float:
    return math.sqrt(sum(number * number for number in numbers) / len(numbers))
