"""One optimizer step on one rank: the norm of the gradient, whether the step is skipped, the updates, the next step's first climbs.

On a CPU the host takes the root of the norm's square: that of torch differs in the last bit on some CPUs. A GPU takes it itself, so that
the host need not wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_zpp.comm.host_link import Home, Readout
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.streams import SideStream
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.loss_scaler import LossScaler
from megatron_zpp.zero.norms import count_zeros, squared_norm, squared_sums_for, weight_norm
from megatron_zpp.zero.optimizer import ShardedAdamW, Update
from megatron_zpp.zero.shared_gradients import SharedGradients
from megatron_zpp.zero.step_calls import StepCalls
from megatron_zpp.zero.training_pass import TrainingPass
from megatron_zpp.zero.unit import WeightUnit

_CLIP_EPSILON = 1e-6

# From the reports of all ranks, [world_size, numel] fp64, whether the update must not be made, [] bool; None if it may.
Refuses = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step: the gradient norm before clipping, and whether the step was skipped, for a NaN, an inf
    or a refusal.

    num_zeros: number of zeros in the mean gradient, if the engine counts them. report: the numbers that ranks have given, rank by rank.
    """

    grad_norm: float
    is_skipped: bool
    num_zeros: int | None
    report: tuple[float, ...]


def never(report: Tensor) -> None:
    """Refuses no step."""


class OptimizerStep:
    """The optimizer steps of one rank. iteration: the number of steps done. loss_scaler: its scale is in the gradients of the next step."""

    def __init__(
        self,
        units: Sequence[WeightUnit],
        gradients: Sequence[UnitGradient],
        options: EngineOptions,
        links: Links,
        optimizer: ShardedAdamW,
        home: Home,
        training_pass: TrainingPass,
        loss_scaler: LossScaler,
    ) -> None:
        """gradients: of the units that are trained, in the same order. home: of the optimizer's state."""
        self.iteration = 0
        self._units = units
        self._trained = [unit for unit in units if unit.trains]
        self._gradients = gradients
        self._optimizer = optimizer
        self._home = home
        self._pass = training_pass
        self._options = options
        self._links = links
        self.loss_scaler = loss_scaler
        self._squared_sums = squared_sums_for(links.device, options.adam.backend)
        self._weight_sums = squared_sums_for(home.device, options.adam.backend)
        self._shared_gradients = SharedGradients(gradients, links, self._trained[0].first_slice, self._trained[0].slices)
        self._step_calls = StepCalls(gradients, links)
        is_enqueued = home.runs_behind and options.adam.skips_on_device
        self._side = SideStream(links.streams) if is_enqueued and links.streams is not None else None

    def finish_gradients(self) -> None:
        """Waits until every descent has landed, makes equal what tensor ranks share, and sets padding to zero."""
        self._pass.finish_descents()
        self._shared_gradients.combine()
        for gradient in self._gradients:
            gradient.clear_padding()

    def run(self, update: Update, report: Tensor | None, refuses: Refuses) -> StepResult:
        """Updates the weights with the clipped mean gradient, unless it has a NaN or inf on any rank. Arguments: as ZeroEngine.update."""
        squared, numbers = self._norm(report, refuses)
        with self._options.observer.phase("optimizer-inner-step"):
            for unit in self._trained:
                unit.finish_climbs()
            if self._side is not None and self._step_calls.reaches_all():  # so nothing is unused
                return self._update_ahead(squared, numbers, update, self._side)
            return self._update_after_reading(numbers, update)

    def _norm(self, report: Tensor | None, refuses: Refuses) -> tuple[Tensor, Readout]:
        """The square of the norm, [] fp64, and numbers on their way to the host.

        In this order: the square, whether orders of hops differ, zeros if they are counted, all reports, what `take_unused` reads.
        """
        with self._options.observer.phase("optimizer-clip-main-grad"):
            calls = self._step_calls.numbers()
            own = calls if report is None else torch.cat((calls, report))
            squared, of_ranks = squared_norm(self._gradients, self._links, self._squared_sums, own)
        reports = of_ranks[:, len(calls) :]
        differ, refusal = self._step_calls.differ(of_ranks), refuses(reports)
        squared = squared.masked_fill(differ if refusal is None else differ | refusal, math.nan)
        numbers = [squared.view(1), differ.view(1)]
        if self._options.counts_zeros:
            with self._options.observer.phase("optimizer-count-zeros"):
                numbers.append(count_zeros(self._gradients, self._links).view(1))
        numbers.append(reports.flatten())
        numbers.append(self._step_calls.left_out(of_ranks))
        return squared, Readout(torch.cat(numbers), self._links.streams)

    def _update_ahead(self, squared: Tensor, numbers: Readout, update: Update, side: SideStream) -> StepResult:
        """Enqueues all updates before the host knows the norm: on the device, an update that is skipped changes nothing.

        The units that the next step needs first climb while the others are updated, in a stream of their own.
        """
        update = replace(update, factor=self._clipping.factor_on_device(squared), skips=skip_flag(squared))
        self._optimizer.update(0, update)
        with side.entered():
            for group in range(1, self._optimizer.groups):
                self._optimizer.update(group, update)
        try:
            result = self._end_iteration(numbers.wait())
            self._begin_climbs(result)
        finally:
            side.join()  # also if the step is refused, because the weights may be read after it
        return result

    def _update_after_reading(self, numbers: Readout, update: Update) -> StepResult:
        """Updates group after group. What the next step needs first climbs meanwhile; on the host all others wait for the next forward."""
        values = numbers.wait()
        unused = self._step_calls.take_unused(values)
        update = replace(update, factor=self._clipping.factor(values[0]), unused=unused)
        result = self._end_iteration(values, unused)
        if not result.is_skipped:
            self._optimizer.later.begin(lambda group: self._optimizer.update(group, update))
        self._begin_climbs(result)
        if not self._home.is_host:
            self._optimizer.later.finish()
        return result

    def _begin_climbs(self, result: StepResult) -> None:
        """Submits the first climbs of the next step."""
        if not result.is_skipped:
            for unit in self._trained:
                unit.invalidate()
        self._pass.begin_climbs()

    def _end_iteration(self, numbers: list[float], unused: Iterable[str] = ()) -> StepResult:
        """numbers: as `_norm` sends them."""
        squared, differ, *others = numbers
        if differ:
            self._step_calls.refuse_difference()
        self._step_calls.begin_step()
        grad_norm = self._clipping.norm(squared)
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self._optimizer.count(unused)
        self.loss_scaler.update(is_overflow=not is_finite)
        self.start_iteration(self.iteration + 1)
        num_zeros = int(others.pop(0)) if self._options.counts_zeros else None
        return StepResult(grad_norm, not is_finite, num_zeros, tuple(others))

    def start_iteration(self, iteration: int) -> None:
        """Sets the number of steps done, and changes the codecs if full precision begins or ends with it."""
        exact = range(self._options.full_precision_iterations)
        changes_codecs = (self.iteration in exact) != (iteration in exact)
        self.iteration = iteration
        self._pass.end_step()
        for unit, gradient in zip(self._trained, self._gradients, strict=True):
            unit.start_iteration(iteration)
            gradient.start_iteration(iteration)
        if not changes_codecs:
            return
        weight_codecs, gradient_codecs = self._options.codecs(iteration)
        for unit in self._units:
            unit.use_codecs(weight_codecs if unit.trains else self._options.for_frozen().codecs(iteration)[0])
        for gradient in self._gradients:
            gradient.use_codecs(gradient_codecs)
        self._links.staging.clear()

    def weight_norm(self) -> float:
        """The L2 norm of all main weights; every rank must call it. No update may be left."""
        return weight_norm(self._units, self._links, self._weight_sums)

    @property
    def _clipping(self) -> Clipping:
        return Clipping(self.loss_scaler.scale, self._options.clip_grad)


@dataclass(frozen=True)
class Clipping:
    """scale: the loss scale, which the gradient still contains. clip_grad: the largest gradient norm, 0 for no clipping."""

    scale: float
    clip_grad: float

    def norm(self, squared_norm: float) -> float:
        """The gradient norm before clipping. A step is skipped if it is not finite."""
        return math.sqrt(squared_norm) / self.scale

    def factor(self, squared_norm: float) -> float:
        """The factor that unscales the gradient and clips it."""
        factor = self.clip_grad / (self.norm(squared_norm) + _CLIP_EPSILON)
        return (factor if 0 < factor < 1 else 1.0) / self.scale

    def factor_on_device(self, squared_norm: Tensor) -> Tensor:
        """The same factor, [] fp32; squared_norm: [] fp64. Undefined if the step is skipped."""
        if self.clip_grad == 0:
            return torch.full_like(squared_norm, 1.0 / self.scale, dtype=torch.float32)
        norm = squared_norm.sqrt() / self.scale
        return ((self.clip_grad / (norm + _CLIP_EPSILON)).clamp(max=1.0) / self.scale).float()


def skip_flag(squared_norm: Tensor) -> Tensor:
    """[] fp32: 1 if a NaN or inf in the gradient makes the ranks skip the step, else 0."""
    return squared_norm.isfinite().logical_not().float()
