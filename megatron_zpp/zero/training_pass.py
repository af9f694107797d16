"""Forward and backward on one rank: what is due when a hook reports, and which gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.links import Links
from megatron_zpp.parallel.specs import Use, outer_units
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.gradient_progress import GradientProgress
from megatron_zpp.zero.gradients import Descents, UnitGradient
from megatron_zpp.zero.hooks import Call, calls_of, hook_parameters, hook_uses
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
from megatron_zpp.zero.schedule import (
    Actions,
    Moment,
    Pass,
    Phase,
    Schedule,
    descent_order,
    evaluation_schedule,
    first_uses,
)
from megatron_zpp.zero.unit import WeightUnit


class TrainingPass:
    """The way of one rank through its model, forward and backward. Hooks on the modules report to it, and its schedules say what is due.

    Every rank acts on the same moments in the same order, whichever modules its own samples go through.
    """

    def __init__(
        self,
        module: nn.Module,
        uses: Sequence[Use],
        training: Schedule,
        units: Sequence[WeightUnit],
        gradients: Sequence[UnitGradient],
        options: EngineOptions,
        links: Links,
        progress: GradientProgress,
        before_climb: Callable[[str], None],
    ) -> None:
        """training: what is due in a step. gradients: of the units that are trained, in the same order.

        before_climb: called with the name of a unit that is about to climb.
        """
        self._module = module
        self._uses = tuple(uses)
        self._outer_units = outer_units(uses)
        self._unit_names = tuple(" + ".join(use.units) for use in uses)
        self._first_use = first_uses(uses)
        self._full_at_gradients = full_at_gradients(uses)
        self._units = {unit.name: unit for unit in units}
        self._gradients = {gradient.name: gradient for gradient in gradients}
        self._links = links
        self._observer = options.observer
        self._progress = progress
        self._before_climb = before_climb
        self._passes = {True: Pass(training), False: Pass(evaluation_schedule(uses, options.prefetch))}
        first = Moment(Phase.PRE_FORWARD, 0)
        self._first_climbs = [(first, replace(training[first], wait=()))]
        self._descents = Descents([unit for unit in descent_order(uses) if unit in self._gradients], self._gradients)
        self._calls = Calls(uses)
        self._forward_trains: bool | None = None  # whether the forward of the whole module that is under way has gradients
        self._is_in_backward = False
        self._is_last_microbatch = True
        self._hooks: list[RemovableHandle] = hook_uses(module, uses, self)
        for unit in units:
            if unit.trains:
                self._hooks += hook_parameters(unit.name, unit.parameters, self)

    # ---- forward

    def begin_forward(self) -> None:
        """Called before the forward of the whole module."""
        if not self._is_in_backward:
            self._forward_trains = torch.is_grad_enabled()
            self._passes[self._is_training].begin()
            self._calls.begin_forward()

    def end_forward(self, outputs: Sequence[Tensor]) -> Call | None:
        """Called after the forward of the whole module, with the tensors that it returns. Returns its call, if it is a use with gradients.

        Other ranks may have gone through uses that this one has left out.
        """
        if self._is_in_backward:
            return None
        for name in self._outer_units:
            refuse_views(self._units[name], outputs)
        self._act(self._passes[self._is_training].due_at_end_of_forward(), self._is_training)
        self._forward_trains = None
        return self._calls.end(0) if self._outer_units and _come_back(outputs) else None

    @property
    def _is_training(self) -> bool:
        """Whether to follow the schedule for training. A use under no_grad inside a training forward follows it, too."""
        return torch.is_grad_enabled() or self._forward_trains is True

    def pre_forward(self, use: int) -> None:
        """Called before a use's forward; within backward it is a recomputation."""
        if self._is_in_backward:
            self._recompute(use)
        else:
            self._book_activations(self._is_training)
            if not self._calls.begin(use) and self._forward_trains is not None:
                refuse_order(self._uses[use])
            self._act(self._due_at(Moment(Phase.PRE_FORWARD, use), self._is_training), self._is_training)

    def _book_activations(self, is_training: bool) -> None:
        """Says under which category the ledger counts what crosses the tensor link and the context link from now on."""
        for link, category in ((self._links.tensor_link, Category.ACTIVATIONS), (self._links.context_link, Category.EXCHANGES)):
            if link is not None:
                link.book_under(category if is_training else Category.EVALUATION)

    def _recompute(self, use: int) -> None:
        """Gathers the weights of a use that is recomputed in a chunk. A use that is recomputed alone has them already, for its backward.

        Raises RuntimeError if they are missing: uses that are recomputed together need the same `recomputed_in`.
        """
        moment = Moment(Phase.RECOMPUTE, use)
        if self._passes[True].is_ahead(moment):
            self._act(self._due_at(moment, is_training=True), is_training=True)
        for name in self._uses[use].units:
            self._units[name].wait(Category.WEIGHTS)

    def post_forward(self, use: int, outputs: Sequence[Tensor]) -> Call | None:
        """Called after a use's forward, with the tensors that it returns. Returns the call, if it is one of a forward with gradients."""
        if self._is_in_backward:
            return None
        for name in self._uses[use].units:
            refuse_views(self._units[name], outputs)
        self._act(self._due_at(Moment(Phase.POST_FORWARD, use), self._is_training), self._is_training)
        return self._calls.end(use) if _come_back(outputs) else None

    # ---- backward

    def pre_backward(self, use: int, call: Call | None) -> None:
        """Called before the backward of a use's call, when the gradients of its outputs have arrived. call: as post_forward returned it."""
        if not self._is_in_backward:
            refuse_other_backward()
        training = self._passes[True]
        if call is not None:
            if self._calls.is_old(call):
                refuse_old_forward()
            if self._calls.reach(call):
                self._act(training.due_at_end_of_backward(), is_training=True)
        moment = Moment(Phase.PRE_BACKWARD, use)
        if use == 0 and self._outer_units and not training.is_ahead(moment):
            return  # it has come with the beginning of this backward
        if training.is_in_backward and not training.is_ahead(moment):
            refuse_order(self._uses[use])
        self._act(self._due_at(moment, is_training=True), is_training=True)

    def collect(self, unit: str, index: int) -> None:
        """Called when the gradient of parameter `index` of a unit is complete: takes it, and starts the descents that may start now."""
        if not self._is_in_backward:
            refuse_other_backward()
        weights, gradient = self._units[unit], self._gradients[unit]
        parameter, name = weights.parameters[index], weights.layout.params[index].spec.name
        if parameter.grad is None:
            raise RuntimeError(f"unit {unit}: parameter {name} reported a gradient and has none")
        if unit in self._full_at_gradients:
            refuse_gradient_without_weights(weights, index)
        self._progress.arrive(name)
        if self._descents.has_completed(unit):
            refuse_late_gradient(weights, index)
        is_complete = gradient.collect(index, parameter.grad)
        parameter.grad = None
        if is_complete and not self._calls.joins_forwards:
            self._descents.complete(unit, is_last_microbatch=self._is_last_microbatch)

    def backward(self, scaled_loss: Tensor, *, is_last_microbatch: bool) -> None:
        """Adds the gradients of one micro-batch, and begins the climbs of the next one, if there is one in this step."""
        self._progress.begin_backward()
        self._is_last_microbatch = is_last_microbatch
        self._is_in_backward = True
        self._book_activations(is_training=True)
        try:
            self._calls.begin_backward(partial(calls_of, scaled_loss))
            if self._outer_units:
                self._act(self._due_at(Moment(Phase.PRE_BACKWARD, 0), is_training=True), is_training=True)
            scaled_loss.backward()
            self._calls.end_backward()
            self._act(self._due_at(Moment(Phase.AFTER_BACKWARD, 0), is_training=True), is_training=True)
            self._descents.sweep(is_last_microbatch=is_last_microbatch)
        finally:
            self._is_in_backward = False
        if not is_last_microbatch:
            self.begin_climbs()
        self._progress.end_backward(is_last_microbatch=is_last_microbatch)

    def finish_descents(self) -> None:
        """Returns once the gradients of all units have landed."""
        refuse_changed(self._units.values())
        self._descents.finish()

    def begin_climbs(self) -> None:
        """Submits the climbs of the units that a forward needs first."""
        self._act(self._first_climbs, is_training=True)

    def end_step(self) -> None:
        """A loss that was computed before is refused from now on: the weights have changed."""
        self._calls.end_step()

    def close(self) -> None:
        """Waits for hops under way, and removes the hooks. The module's forward raises RuntimeError from now on."""
        try:
            self._links.lanes.drain()
        finally:
            for hook in self._hooks:
                hook.remove()
            refuse_forward(self._module, self._uses)

    def __reduce__(self) -> str:  # the hooks of a module refer to it
        raise RuntimeError("a sharded module cannot be copied or saved, because its weights are not in it; use dict(full_weights(engine))")

    # ---- what is due

    def _due_at(self, moment: Moment, is_training: bool) -> list[tuple[Moment, Actions]]:
        self._tell(moment)
        return self._passes[is_training].due_at(moment)

    def _act(self, moments: Sequence[tuple[Moment, Actions]], is_training: bool) -> None:
        for due, actions in moments:
            if due.phase is Phase.PRE_BACKWARD:
                self._complete_before(due)
            for name in actions.rest:
                self._units[name].rest()
            for rung, names in ((Rung.FULL, actions.climb_to_full), (Rung.SECONDARY, actions.climb_to_secondary)):
                for name in names:
                    self._before_climb(name)
                    self._units[name].climb(rung)
            for name in actions.wait:
                self._units[name].wait(Category.WEIGHTS if is_training else Category.EVALUATION)

    def _complete_before(self, moment: Moment) -> None:
        """Descends units that get no more gradients, before the climbs of this moment: other ranks send in that order."""
        self._descents.complete_over(
            lambda unit: self._first_use[unit] > moment.use and self._calls.is_over(unit), is_last_microbatch=self._is_last_microbatch
        )

    def _tell(self, moment: Moment) -> None:
        if moment.phase is Phase.PRE_FORWARD:
            self._observer.begin_unit("forward", self._unit_names[moment.use])
        elif moment.phase in (Phase.PRE_BACKWARD, Phase.RECOMPUTE):
            self._observer.begin_unit("backward", self._unit_names[moment.use])
        else:
            self._observer.end_unit()


def _come_back(outputs: Sequence[Tensor]) -> bool:
    """Whether backward can reach a call through what it returns."""
    return torch.is_grad_enabled() and any(output.requires_grad for output in outputs)


class Calls:
    """The calls of a step in forward, and how far backward has come in them.

    Autograd runs the backward of what was computed last first. So when backward comes to a call, no more gradients come from later calls.
    joins_forwards: whether the loss under way joins several forwards. Other ranks may have left out other uses of each, so no unit is over
    before the end of backward.
    """

    def __init__(self, uses: Sequence[Use]) -> None:
        self._units = [use.units for use in uses]
        self._next = 0
        self._forward = 0
        self._step = 0
        self._begun: dict[int, int] = {}  # by use called in this forward: how many calls with gradients had ended when it began
        self._open: dict[int, Call] = {}  # by number, those that no backward has reached
        self.joins_forwards = False
        self._reached = 0
        self._forward_reached: int | None = None
        self._first: dict[str, int] = {}  # by unit that backward will reach, `begun` of the first of its calls

    def begin_forward(self) -> None:
        """A forward begins."""
        self._forward += 1
        self._begun = {}

    def begin(self, use: int) -> bool:
        """A call begins. Returns whether it comes in order in its forward. A second call of a use begins another forward."""
        if use in self._begun:
            self.begin_forward()
        comes_in_order = use >= max(self._begun, default=0)
        self._begun[use] = self._next
        return comes_in_order

    def end(self, use: int) -> Call:
        """The same call ends."""
        call = self._open[self._next] = Call(use, self._next, self._begun.get(use, 0), self._forward, self._step)
        self._next += 1
        return call

    def begin_backward(self, calls_of_loss: Callable[[], Iterable[Call]]) -> None:
        """Backward begins. calls_of_loss: finds the calls on which the loss depends; it is called only if several forwards are open."""
        calls = list(self._open.values())
        if _are_of_several_forwards(calls):
            calls = list(calls_of_loss())
        self.joins_forwards = _are_of_several_forwards(calls)
        self._reached, self._forward_reached, self._first = self._next, None, {}
        for call in calls:
            for unit in self._units[call.use]:
                self._first[unit] = min(call.begun, self._first.get(unit, call.begun))

    def is_old(self, call: Call) -> bool:
        """Whether the call came before the last step."""
        return call.step != self._step

    def reach(self, call: Call) -> bool:
        """Backward comes to a call. Returns whether it has come there from the calls of another forward."""
        before, self._forward_reached = self._forward_reached, call.forward
        self._reached = call.number
        self._open.pop(call.number, None)
        return before not in (None, call.forward)

    def is_over(self, unit: str) -> bool:
        """Whether no more gradients of the unit come in this backward."""
        return not self.joins_forwards and self._reached < self._first.get(unit, self._next)

    def end_backward(self) -> None:
        """Backward comes to its end."""
        self._reached = -1

    def end_step(self) -> None:
        """What was called before it is not used any more."""
        self._step += 1
        self._open.clear()


def _are_of_several_forwards(calls: Sequence[Call]) -> bool:
    return len({call.forward for call in calls}) > 1
