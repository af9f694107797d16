"""The ZeRO engine: shards a model's units, gathers their weights before each use, and reduces their gradients.

It reads one row of the policy table and one schedule. It never asks which ZeRO stage is running.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.link_codecs import LinkCodecs
from megatron_zpp.comm.links import Ladder
from megatron_zpp.comm.readout import Readout
from megatron_zpp.comm.streams import SideStream
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.zero.calls import Call, Calls
from megatron_zpp.zero.clipping import Clipping, skips_on_device
from megatron_zpp.zero.count_zeros import count_zeros
from megatron_zpp.zero.descents import Descents
from megatron_zpp.zero.ending import end_all
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.grad_norm import squared_norm, weight_norm
from megatron_zpp.zero.gradient_progress import GradientProgress
from megatron_zpp.zero.gradients import Collector, UnitGradient
from megatron_zpp.zero.home import home_of
from megatron_zpp.zero.hooks import hook_parameters, hook_uses
from megatron_zpp.zero.later_updates import LaterUpdates
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.loss_scaler import ConstantLossScaler, LossScaler
from megatron_zpp.zero.optimizer import ShardedAdamW
from megatron_zpp.zero.outputs import calls_of
from megatron_zpp.zero.policy import Rung
from megatron_zpp.zero.refusals import (
    full_at_gradients,
    refuse_changed,
    refuse_forward,
    refuse_gradient_without_weights,
    refuse_late_gradient,
    refuse_old_forward,
    refuse_order,
    refuse_other_backward,
    refuse_views,
)
from megatron_zpp.zero.schedule import Actions, Moment, Pass, Phase, descent_order, evaluation_schedule, first_uses, training_schedule
from megatron_zpp.zero.shared_gradients import SharedGradients
from megatron_zpp.zero.squared_sums import squared_sums_for
from megatron_zpp.zero.state_bytes import StateBytes, state_bytes
from megatron_zpp.zero.step_calls import StepCalls
from megatron_zpp.zero.step_result import StepResult
from megatron_zpp.zero.unit import WeightUnit
from megatron_zpp.zero.unit_descent import UnitDescent
from megatron_zpp.zero.update import Update
from megatron_zpp.zero.update_groups import update_groups


class ZeroEngine:
    """One rank's part of a sharded model.

    Every rank must make the same calls in the same order. shard() makes an engine for any module (zero/shard.py).
    module: its parameters may be on the meta device; each is replaced by an nn.Parameter of its unit.
    dtype: of the working weights. rank, data_rank, device: of this process; it is one of `world_size` processes and `data_ranks` ranks of
    its ladder.
    units, gradients: its parts of each unit, in the order of `unit_specs`.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_specs: Sequence[UnitSpec],
        uses: Sequence[Use],
        options: EngineOptions,
        ladder: Ladder,
        loss_scaler: LossScaler | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """on_close: ends what was made for this engine alone, such as process groups. `close` calls it."""
        self.module = module
        self.ladder = ladder
        self.device = ladder.device
        self.rank = ladder.backend.rank
        self.world_size = ladder.grid.world_size
        self.data_rank = ladder.data_rank
        self.data_ranks = ladder.topology.data_ranks
        self.loss_scaler = loss_scaler or ConstantLossScaler()
        self.observer = options.observer
        self._options = options
        self.dtype = options.dtype
        self._policy = options.policy.in_world(ladder.topology)
        self._uses = tuple(uses)
        self._unit_names = tuple(" + ".join(use.units) for use in uses)
        self._first_use = first_uses(uses)
        self._full_at_gradients = full_at_gradients(uses)
        training = training_schedule(uses, options.prefetch)
        self._passes = {True: Pass(training), False: Pass(evaluation_schedule(uses, options.prefetch))}
        self._first_actions = training[Moment(Phase.PRE_FORWARD, 0)]
        self.units: list[WeightUnit] = []
        self.gradients: list[UnitGradient] = []
        self._unit_descents: list[UnitDescent] = []
        self._iteration = 0
        self._hooks: list[RemovableHandle] = []
        for spec in unit_specs:
            self._add_unit(spec)
        self._unit_of = {unit.name: unit for unit in self.units}
        self._squared_sums = squared_sums_for(ladder.device, options.adam.backend)
        self._home = home = home_of(self._policy, ladder)
        self._weight_sums = squared_sums_for(home.device, options.adam.backend)
        self._update_groups = update_groups([unit.name for unit in self.units], training.values(), at_once=home.runs_behind)
        self.optimizer = ShardedAdamW(self.units, self.gradients, self._update_groups, options.adam, home.link)
        self._later = LaterUpdates([[self.units[index].name for index in group] for group in self._update_groups])
        is_enqueued = home.runs_behind and options.adam.skips_on_device
        self._side = SideStream(ladder.streams) if is_enqueued and ladder.streams is not None else None
        by_name = {unit.name: descent for unit, descent in zip(self.units, self._unit_descents, strict=True)}
        self._descents = Descents(descent_order(uses), by_name)
        self._shared_gradients = SharedGradients(self.gradients, ladder, self.units[0].first_slice, self.units[0].slices)
        self._step_calls = StepCalls(self.gradients, ladder)
        self._calls = Calls(uses)
        self._forward_trains: bool | None = None  # whether the forward of the whole module that is under way has gradients
        self._is_in_backward = False
        self._is_last_microbatch = True
        self._progress = GradientProgress()
        self._is_closed = False
        self._on_close = on_close
        self._hooks += hook_uses(module, uses, self)

    def _add_unit(self, spec: UnitSpec) -> None:
        ladder, policy, dtype = self.ladder, self._policy, self._options.dtype
        layout = FlatLayout(spec.params, self.data_ranks, self._options.block_numel)
        weight_codecs, gradient_codecs = self._codecs()
        unit = WeightUnit(spec, layout, policy, ladder, weight_codecs, dtype)
        gradient = UnitGradient(spec.name, layout, policy, ladder)
        collector = Collector(gradient, policy, dtype, ladder)
        descent = UnitDescent(gradient, collector, policy, ladder, gradient_codecs)
        for parameter, placed in zip(unit.parameters, layout.params, strict=True):
            owner, _, attribute = placed.spec.name.rpartition(".")
            setattr(self.module.get_submodule(owner), attribute, parameter)
        number, engine = len(self.units), weakref.proxy(self)  # what a tensor's hook refers to is hidden from the garbage collector
        self._hooks += hook_parameters(unit.parameters, lambda index: engine._collect(number, index))
        self.units.append(unit)
        self.gradients.append(gradient)
        self._unit_descents.append(descent)

    def _codecs(self) -> tuple[LinkCodecs, LinkCodecs]:
        """The codecs of weights and those of gradients, in the current iteration."""
        options = self._options
        is_exact = self._iteration < options.full_precision_iterations
        policy = self._policy.in_full_precision() if is_exact else self._policy
        weights, gradients = (
            LinkCodecs.of(codes, options.dtype, options.block_numel, options.noise_seed, options.make_codec)
            for codes in (policy.weight_codes, policy.gradient_codes)
        )
        return weights, gradients

    # ---- forward and backward

    def begin_forward(self) -> None:
        """Called before the forward of the whole module."""
        if not self._is_in_backward:
            self._forward_trains = torch.is_grad_enabled()
            self._passes[self._is_training].begin()
            self._calls.begin_forward()

    def end_forward(self) -> None:
        """Called after the forward of the whole module: other ranks may have gone through uses that this one has left out."""
        if not self._is_in_backward:
            self._act(self._passes[self._is_training].due_at_end_of_forward(), self._is_training)
            self._forward_trains = None

    @property
    def _is_training(self) -> bool:
        """Whether the schedule is that for training: also for a use under no_grad in a training forward, which other ranks may not have."""
        return torch.is_grad_enabled() or self._forward_trains is True

    def pre_forward(self, use: int) -> None:
        """Called before a use's forward; within backward it is a recomputation."""
        if self._is_in_backward:
            self._recompute(use)
        else:
            self._book_activations(self._is_training)
            if not self._calls.begin(use) and self._forward_trains is not None:
                refuse_order(self._uses[use])
            self._reach(Moment(Phase.PRE_FORWARD, use), self._is_training)

    def _book_activations(self, is_training: bool) -> None:
        """Tells the tensor link and the context link, if there are any, for what the model uses them from now on."""
        for link, category in ((self.ladder.tensor_link, Category.ACTIVATIONS), (self.ladder.context_link, Category.EXCHANGES)):
            if link is not None:
                link.book_under(category if is_training else Category.EVALUATION)

    def _recompute(self, use: int) -> None:
        """Gathers the weights of a use that is recomputed in a chunk. A use that is recomputed alone has them already, for its backward.

        Raises RuntimeError if they are missing: uses that are recomputed together need the same `recomputed_in`.
        """
        moment = Moment(Phase.RECOMPUTE, use)
        if self._passes[True].is_ahead(moment):
            self._reach(moment, is_training=True)
        for name in self._uses[use].units:
            self._unit_of[name].wait(Category.WEIGHTS)

    def post_forward(self, use: int, outputs: Sequence[Tensor]) -> Call | None:
        """Called after a use's forward, with the tensors that it returns. Returns the call, if it is one of a forward with gradients."""
        if self._is_in_backward:
            return None
        for name in self._uses[use].units:
            refuse_views(self._unit_of[name], outputs)
        self._reach(Moment(Phase.POST_FORWARD, use), self._is_training)
        return self._calls.end(use, self._iteration) if torch.is_grad_enabled() else None

    def pre_backward(self, use: int, call: Call | None) -> None:
        """Called before the backward of a use's call, when the gradients of its outputs have arrived. call: as post_forward returned it."""
        if not self._is_in_backward:
            refuse_other_backward()
        training = self._passes[True]
        if call is not None:
            refuse_old_forward(call, self._iteration)
            if self._calls.reach(call):
                self._act(training.due_at_end_of_backward(), is_training=True)
        moment = Moment(Phase.PRE_BACKWARD, use)
        if training.is_in_backward and not training.is_ahead(moment):
            refuse_order(self._uses[use])
        self._reach(moment, is_training=True)

    def backward(self, loss: Tensor, *, microbatches: int = 1, is_last_microbatch: bool = True) -> None:
        """Adds the gradients of one micro-batch. loss: its mean loss. microbatches: how many there are in this step.

        is_last_microbatch: whether this is the last one of the step. Raises RuntimeError for a micro-batch after the last one, ValueError
        if `microbatches` is no number of 1 or more.
        """
        self._check_open()
        if not 1 <= microbatches < math.inf:
            raise ValueError(f"microbatches is {microbatches}; give the number of micro-batches in this step, 1 or more")
        self.finish_updates()  # of units that this forward did not reach: gradients are written over the sums that they read
        self._progress.begin_backward()
        self._is_last_microbatch = is_last_microbatch
        self._is_in_backward = True
        self._book_activations(is_training=True)
        try:
            scaled = loss * (self.loss_scaler.scale / microbatches)
            self._calls.begin_backward(partial(calls_of, scaled))
            scaled.backward()
            self._calls.end_backward()
            self._reach(Moment(Phase.AFTER_BACKWARD, 0), is_training=True)
            self._descents.sweep(is_last_microbatch=is_last_microbatch)
        finally:
            self._is_in_backward = False
        if not is_last_microbatch:
            self._submit_climbs(self._first_actions)
        self._progress.end_backward(is_last_microbatch=is_last_microbatch)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the engine is closed")

    def _reach(self, moment: Moment, is_training: bool) -> None:
        self._tell(moment)
        self._act(self._passes[is_training].due_at(moment), is_training)

    def _act(self, moments: Sequence[tuple[Moment, Actions]], is_training: bool) -> None:
        for due, actions in moments:
            if due.phase is Phase.PRE_BACKWARD:
                self._complete_before(due)
            for name in actions.rest:
                self._unit_of[name].rest()
            self._submit_climbs(actions)
            for name in actions.wait:
                self._unit_of[name].wait(Category.WEIGHTS if is_training else Category.EVALUATION)

    def _complete_before(self, moment: Moment) -> None:
        """Completes units that are over, if their turn is before this moment: other ranks send their gradients before they climb here."""
        self._descents.complete_over(
            lambda unit: self._first_use[unit] > moment.use and self._calls.is_over(unit), is_last_microbatch=self._is_last_microbatch
        )

    def _tell(self, moment: Moment) -> None:
        if moment.phase is Phase.PRE_FORWARD:
            self.observer.begin_unit("forward", self._unit_names[moment.use])
        elif moment.phase in (Phase.PRE_BACKWARD, Phase.RECOMPUTE):
            self.observer.begin_unit("backward", self._unit_names[moment.use])
        else:
            self.observer.end_unit()

    def _submit_climbs(self, actions: Actions) -> None:
        for rung, names in ((Rung.FULL, actions.climb_to_full), (Rung.SECONDARY, actions.climb_to_secondary)):
            for name in names:
                self._later.reach(name)
                self._unit_of[name].climb(rung)

    def _collect(self, number: int, index: int) -> None:
        unit, descent = self.units[number], self._unit_descents[number]
        parameter = unit.parameters[index]
        if parameter.grad is None:
            raise RuntimeError(f"unit {unit.name}: parameter {unit.layout.params[index].spec.name} reported a gradient and has none")
        if unit.name in self._full_at_gradients:
            refuse_gradient_without_weights(unit, index)
        self._progress.arrive(unit.layout.params[index].spec.name)
        if self._descents.has_completed(unit.name):
            refuse_late_gradient(unit, index)
        is_complete = descent.collect(index, parameter.grad)
        parameter.grad = None
        if is_complete and not self._calls.ends_at_once:
            self._descents.complete(unit.name, is_last_microbatch=self._is_last_microbatch)

    # ---- step

    def step(self, learning_rate: float, weight_decay: float | None = None) -> StepResult:
        """One optimizer step: `finish_gradients`, then `update`."""
        self.finish_gradients()
        return self.update(learning_rate, weight_decay)

    def finish_gradients(self) -> None:
        """Waits until every descent has landed, makes equal what tensor ranks share, and sets padding to zero.

        Every rank must call it after the last backward, before `update`; a second call in a step does nothing. Raises RuntimeError if no
        micro-batch of this step was the last.
        """
        self._check_open()
        if not self._progress.is_mean_missing():
            return
        refuse_changed(self.units)
        self._descents.finish()
        self._shared_gradients.combine()
        for descent in self._unit_descents:
            descent.clear_padding()
        self._progress.end_mean()

    def update(
        self, learning_rate: float, weight_decay: float | None = None, report: Tensor | None = None, refusal: Tensor | None = None
    ) -> StepResult:
        """Updates the weights with the clipped mean gradient. A NaN or inf in it makes every rank skip the update.

        weight_decay: of this step; by default that of the options. report: [numel] fp64, which come to the host with the norm, so that it
        waits only once. refusal: [] bool, alike on every rank; if it is true, the update is skipped as if the norm were NaN. Raises
        RuntimeError if `finish_gradients` has not been called after the last backward, ValueError for a learning rate or weight decay that
        is negative or not finite.
        """
        self._check_open()
        self._progress.begin_update()
        update = Update(learning_rate, self._options.adam.weight_decay if weight_decay is None else weight_decay)
        squared, numbers = self._norm(report, refusal)
        with self.observer.phase("optimizer-inner-step"):
            for unit in self.units:
                unit.finish_climbs()
            if self._side is not None and self._step_calls.reaches_all():  # so nothing is unused
                result = self._update_ahead(squared, numbers, update, self._side)
            else:
                result = self._update_after_reading(numbers, update)
        self._progress.end_update()
        return result

    def _norm(self, report: Tensor | None, refusal: Tensor | None) -> tuple[Tensor, Readout]:
        """The square of the norm, [] fp64, and numbers on their way to the host.

        These are the square, whether the calls of ranks differ, zeros if they are counted, `report`, and what tells unused parameters.
        """
        with self.observer.phase("optimizer-clip-main-grad"):
            squared, of_ranks = squared_norm(self.gradients, self.ladder, self._squared_sums, self._step_calls.numbers())
        differ = self._step_calls.differ(of_ranks)
        squared = squared.masked_fill(differ if refusal is None else differ | refusal, math.nan)
        numbers = [squared.view(1), differ.view(1)]
        if self._options.counts_zeros:
            with self.observer.phase("optimizer-count-zeros"):
                numbers.append(count_zeros(self.gradients, self.ladder).view(1))
        if report is not None:
            numbers.append(report)
        numbers.append(self._step_calls.of_unused(of_ranks))
        return squared, Readout(torch.cat(numbers), self.ladder.streams)

    def _update_ahead(self, squared: Tensor, numbers: Readout, update: Update, side: SideStream) -> StepResult:
        """Enqueues all updates before the host knows the norm: on the device, an update that is skipped changes nothing.

        The units that the next step needs first climb while the others are updated, in a stream of their own.
        """
        update = replace(update, factor=self._clipping.factor_on_device(squared), skips=skips_on_device(squared))
        self.optimizer.update(0, update)
        with side.entered():
            for group in range(1, len(self._update_groups)):
                self.optimizer.update(group, update)
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
            self._later.begin(lambda group: self.optimizer.update(group, update))
        self._begin_climbs(result)
        if not self._home.is_host:
            self.finish_updates()
        return result

    def _begin_climbs(self, result: StepResult) -> None:
        """Submits the first climbs of the next step."""
        if not result.is_skipped:
            for unit in self.units:
                unit.invalidate()
        self._submit_climbs(self._first_actions)

    def finish_updates(self) -> None:
        """Makes the updates that wait for the next forward. Call it before main weights or moments are read or written."""
        self._later.finish()

    def _end_iteration(self, numbers: list[float], unused: Iterable[str] = ()) -> StepResult:
        """numbers: as `_norm` sends them."""
        squared, differ, *others = numbers
        if differ:
            self._step_calls.refuse_difference()
        self._step_calls.begin_step()
        grad_norm = self._clipping.norm(squared)
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self.optimizer.count(unused)
        self.loss_scaler.update(is_overflow=not is_finite)
        self.start_iteration(self._iteration + 1)
        num_zeros = int(others.pop(0)) if self._options.counts_zeros else None
        return StepResult(grad_norm, not is_finite, num_zeros, tuple(others))

    @property
    def _clipping(self) -> Clipping:
        return Clipping(self.loss_scaler.scale, self._options.clip_grad)

    def weights_changed(self, *, copies_are_filled: bool = False) -> None:
        """Marks the weights on every rung as stale. Call it after any write to the main weights.

        copies_are_filled: whether this rank's slices of copies that are kept across steps have been written as well. Otherwise they are
        taken from the main weights. Raises RuntimeError if updates were not finished before the write: they would change what was written.
        """
        self._later.check_finished()
        for unit in self.units:
            unit.replace(copy_is_filled=copies_are_filled)

    @property
    def keeps_copies(self) -> bool:
        """Whether copies of the weights are kept across steps, to which differences are added."""
        return self._policy.keeps_copy

    def finish_differences(self) -> None:
        """Finishes updates, adds their differences to kept copies, and waits. Every rank must call it, before a save."""
        self.finish_updates()
        if not self.keeps_copies:
            return
        for unit in self.units:
            unit.climb(self._policy.weights_in_step)
            if self._policy.weights_in_step is Rung.FULL:
                unit.wait(Category.WEIGHTS)  # one by one, because each holds a secondary rung until its full one has landed
        for unit in self.units:
            unit.finish_climbs()

    def start_iteration(self, iteration: int) -> None:
        """Sets the number of steps done, and ends full precision when it is due. A resumed run calls it before its first step."""
        ends_full_precision = self._iteration < self._options.full_precision_iterations <= iteration
        self._iteration = iteration
        self._calls.end_step()
        for unit, descent in zip(self.units, self._unit_descents, strict=True):
            unit.start_iteration(iteration)
            descent.start_iteration(iteration)
        if not ends_full_precision:
            return
        weight_codecs, gradient_codecs = self._codecs()
        for unit, descent in zip(self.units, self._unit_descents, strict=True):
            unit.use_codecs(weight_codecs)
            descent.use_codecs(gradient_codecs)
        self.ladder.staging.clear()

    # ---- sizes and norms

    def state_bytes(self) -> StateBytes:
        """Bytes that weights, gradients and optimizer state take now, on this rank's device and on its host."""
        return state_bytes(self.units, self.gradients, self.optimizer, self._home)

    def gather_world(self, own: Tensor) -> Tensor:
        """`own` [numel] of every rank, [data ranks, tensor ranks, numel]; for a few numbers. Every rank must call it."""
        return self.ladder.gather_world(own)

    def weight_norm(self) -> float:
        """The L2 norm of all main weights; every rank must call it."""
        self.finish_updates()
        return weight_norm(self.units, self.ladder, self._weight_sums)

    def close(self) -> None:
        """Finishes updates, and waits for climbs that were submitted ahead, so that no message is under way when the process groups end.

        It removes the hooks, because the module and autograd would keep the engine alive through them. A forward of the module after it
        raises RuntimeError. Every rank must call it. If a part of it fails, the others are done, and `on_close` is left out.
        """
        if self._is_closed:
            return
        self._is_closed = True
        hooks = [hook.remove for hook in self._hooks]
        end_all(self.finish_updates, self.ladder.lanes.drain, *hooks, partial(refuse_forward, self.module, self._uses))
        if self._on_close is not None:
            self._on_close()

    def __reduce__(self) -> str:
        raise RuntimeError("a sharded module cannot be copied or saved, because its weights are not in it; use dict(full_weights(engine))")
