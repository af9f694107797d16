"""What an island of a run learns of the others, now and then: a message in every step would wait for the slow link between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_zpp.comm.links import Links
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.training.metrics import Interval, ReportInputs
from megatron_zpp.training.stop_conditions import StopRequest


class OtherIslands:
    """The islands of a run as one of them sees them. outer: None in a run without islands, where nothing crosses.

    Every rank of every island must make the same calls.
    """

    def __init__(self, outer: OuterSteps | None) -> None:
        self._outer = outer
        self._noted = StopRequest.NONE

    def requests(self, own: StopRequest, iteration: int) -> StopRequest:
        """The stop requests that every island knows of after this iteration. own: those of this one, which are told when a period ends."""
        if self._outer is None:
            return own
        self._noted |= own
        if iteration % self._outer.options.period != 0:
            return StopRequest.NONE
        return StopRequest.of_ranks(_of_islands(self._outer.links, [self._noted]).flatten().tolist())

    def report(self, interval: Interval, inputs: ReportInputs) -> tuple[Interval, ReportInputs]:
        """The same with the numbers of all islands: the mean of their losses and counts of zeros, and the root mean square of their norms.

        Iterations that were skipped or had no finite loss are those of the island that has the most, and the loss scale is the smallest.
        """
        if self._outer is None:
            return interval, inputs
        latest = inputs.latest
        outcome = latest.outcome
        rows = _of_islands(
            self._outer.links,
            [
                *(sum(interval.losses), len(interval.losses), interval.skipped_iterations, interval.nan_iterations, latest.loss_scale),
                *(outcome.lm_loss, outcome.grad_norm, outcome.num_zeros or 0, inputs.params_norm or 0.0),
            ],
        )
        loss_sum, losses = rows[:, :2].sum(dim=0).tolist()
        skipped, without_loss = (int(most) for most in rows[:, 2:4].max(dim=0).values.tolist())
        lm_loss, _, zeros, _ = rows[:, 5:].mean(dim=0).tolist()
        grad_norm, params_norm = (math.sqrt(square) for square in rows[:, [6, 8]].square().mean(dim=0).tolist())
        outcome = replace(outcome, lm_loss=lm_loss, grad_norm=grad_norm, num_zeros=None if outcome.num_zeros is None else round(zeros))
        latest = replace(latest, outcome=outcome, loss_scale=rows[:, 4].min().item())
        mean_losses = [loss_sum / losses] if losses else []
        return (
            replace(interval, losses=mean_losses, skipped_iterations=skipped, nan_iterations=without_loss),
            replace(inputs, latest=latest, params_norm=None if inputs.params_norm is None else params_norm),
        )


def _of_islands(column: Links, own: Sequence[float]) -> Tensor:
    """`own` of every island, [islands, len(own)] fp64 on the host."""
    return column.gather_world(torch.tensor(own, dtype=torch.float64, device=column.device)).flatten(0, 1).cpu()
