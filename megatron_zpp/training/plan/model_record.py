"""Runs the forward and backward of a model on the meta device, and notes for every use what it computes, sends and keeps.

The same model on the same ranks is recorded once, whatever the engine does with its weights (training/plan/hollow_model.py).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.training.plan.kinds import ACTIVATIONS, PAYLOADS
from megatron_zpp.training.plan.live_memory import LiveMemory, Workspace
from megatron_zpp.training.plan.operators import Operators
from megatron_zpp.training.plan.program import Item
from megatron_zpp.training.plan.recorder import PlannedStaging, RecordedStreams, Recorder
from megatron_zpp.zero.hooks import hook_uses


class Event(enum.Enum):
    """What a use comes to. GRADIENT: of a parameter."""

    FORWARD = "forward"
    AFTER = "after"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Mark:
    """A moment of the model. use: its number. parameter: its path, of a gradient."""

    event: Event
    use: int
    parameter: str = ""


@dataclass
class Part:
    """What happens from a mark to the next one. peak: the most bytes above those at its start; change: those at its end."""

    mark: Mark
    items: list[Item] = field(default_factory=list)
    peak: int = 0
    change: int = 0


@dataclass
class ModelRecord:
    """The parts of one micro-batch, in order. uses, units: of the model.

    lasting, lasting_on_host: the bytes by kind that there are before the first of them, on the device and on its host.
    """

    uses: tuple[Use, ...]
    units: tuple[UnitSpec, ...]
    parts: list[Part]
    lasting: Counter[str]
    lasting_on_host: Counter[str]


class _Callbacks:
    """Receives the hooks of the model, as the engine does in a run."""

    def __init__(self, uses: Sequence[Use], live: LiveMemory, recorder: Recorder) -> None:
        self.parts: list[Part] = []
        self._live = live
        self._recorder = recorder
        self._start = 0
        self._use = 0
        self.is_in_backward = False
        self.lasting = Counter[str]()
        self.lasting_on_host = Counter[str]()

    def begin_forward(self) -> None: ...

    def end_forward(self, outputs: Sequence[Tensor]) -> None: ...

    def pre_forward(self, use: int) -> None:
        self.reach(Mark(Event.RECOMPUTE if self.is_in_backward else Event.FORWARD, use))

    def post_forward(self, use: int, outputs: Sequence[Tensor]) -> None:
        self.reach(Mark(Event.AFTER, use))

    def pre_backward(self, use: int, call: object) -> None:
        self.reach(Mark(Event.BACKWARD, use))

    def collect(self, name: str, parameter: nn.Parameter) -> None:
        self.reach(Mark(Event.GRADIENT, self._use, name))
        parameter.grad = None

    def reach(self, mark: Mark) -> None:
        if not self.parts:
            self.lasting, self.lasting_on_host = Counter(self._live.by_kind), Counter(self._live.on_host)
        self.end_part()
        self._use = mark.use
        part = Part(mark)
        self.parts.append(part)
        self._recorder.items = part.items

    def end_part(self) -> None:
        if self.parts:
            self.parts[-1].change = self._live.total - self._start
        self._start = self._live.total

    def at_peak(self, workspace: int) -> None:
        if self.parts:
            part = self.parts[-1]
            part.peak = max(part.peak, self._live.total + workspace - self._start)


def record_model(
    module: nn.Module,
    units: Sequence[UnitSpec],
    uses: Sequence[Use],
    recorder: Recorder,
    loss_of: Callable[[LiveMemory], Tensor],
    workspace: Workspace,
    places: Sequence[RecordedStreams | PlannedStaging] = (),
    *,
    is_training: bool = True,
) -> ModelRecord:
    """One forward and backward. loss_of: calls the module, whose parameters are on the meta device. places: that its links use.

    is_training: otherwise it is a forward of evaluation alone, without gradients.

    What `loss_of` makes before it calls the module and keeps, such as the micro-batch, lasts; and so do the buffers of the links, which
    every micro-batch uses again.
    """
    callbacks: _Callbacks
    operators = Operators(recorder)
    live = operators.live = LiveMemory(workspace, lambda nbytes: callbacks.at_peak(nbytes), operators)
    callbacks = _Callbacks(uses, live, recorder)
    for place in places:
        place.live = live
    handles = [*hook_uses(module, uses, callbacks)]
    for unit in units:
        for spec in unit.params:
            parameter = module.get_parameter(spec.name)
            handles.append(parameter.register_post_accumulate_grad_hook(partial(callbacks.collect, spec.name)))
    try:
        with live, live.of_kind(ACTIVATIONS), torch.set_grad_enabled(is_training):
            loss = loss_of(live)
            if is_training:
                callbacks.is_in_backward = True
                loss.backward()
            callbacks.end_part()
    finally:
        for handle in handles:
            handle.remove()
    callbacks.lasting[PAYLOADS] += sum(place.allocated_bytes for place in places if isinstance(place, PlannedStaging))
    return ModelRecord(tuple(uses), tuple(units), callbacks.parts, callbacks.lasting, callbacks.lasting_on_host)
