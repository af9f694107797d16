"""AdamW over the main weights that this rank owns, a group of units at a time: at once, or when the next forward needs them.

Where the optimizer is on the host, updates are put off:

    host      norm | AdamW 0 1 2 | launch use 0, AdamW 3 | launch use 1, AdamW 4 | launch use 2 ...
    device                                 use 0                   use 1                  use 2

A unit is updated just before its next climb is submitted, by the thread that enqueues the work of the device. So the device computes what
has been enqueued while the host updates. A second thread would save no more: this one has nothing else to do meanwhile, both would compete
for the interpreter, and on a CPU for the cores.

AdamW takes parts of a unit as its parameters: one view of the main weights per range that is updated alike. Views begin where blocks do, at
multiples of 32 elements, so every stage gets the same bits wherever its views end. At other places they would differ: torch's fused kernels
round the last elements of a view differently if they do not fill one of their vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.host_link import Arrival, HostLink
from megatron_zpp.config.flag import next_multiple
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.adam import Adam, AdamGroup, AdamOptions, make_adam
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.policy import MOMENTS
from megatron_zpp.zero.unit import WeightUnit


@dataclass(frozen=True)
class Update:
    """One step of AdamW. factor: of the gradients, a number or [] fp32; it unscales and clips them. skips: see Adam.update.

    unused: paths of parameters that it passes over: they neither decay nor go on by their moments, as in plain torch without a gradient.
    Raises UserError for a learning rate or weight decay that is negative, NaN or infinite.
    """

    learning_rate: float
    weight_decay: float
    factor: float | Tensor = 1.0
    skips: Tensor | None = None
    unused: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, value in (("learning_rate", self.learning_rate), ("weight_decay", self.weight_decay)):
            if not 0 <= value < math.inf:
                raise UserError(f"{name} is {value}; give a finite number, 0 or more")


class ShardedAdamW:
    """AdamW on views of the fp32 main weights; one call updates a group of units.

    Gradients cross `link` to the optimizer's home, those of the next group while one is updated.
    moments: for each unit, one tensor per name of MOMENTS, fp32 like its main weight; the optimizer's state tensors are views of them.
    steps: number of updates so far. unused_steps: by parameter, how many of them have passed it over because it was unused. The caller
    counts them, because only it knows which updates are skipped. later: the updates that are put off.
    """

    def __init__(
        self,
        units: Sequence[WeightUnit],
        gradients: Sequence[UnitGradient],
        groups: Sequence[Sequence[int]],
        options: AdamOptions,
        link: HostLink,
    ) -> None:
        """groups: indices of the units that are updated together; each unit is in one group."""
        self.steps = 0
        self.unused_steps: dict[str, int] = {}
        self.moments = [{name: torch.zeros_like(unit.main_weight) for name in MOMENTS} for unit in units]
        self.later = LaterUpdates([[units[index].name for index in group] for group in groups])
        order = [index for group in groups for index in group]
        arrivals = dict(zip(order, link.arrivals([gradients[index].for_optimizer for index in order]), strict=True))
        self._groups = [_Group([_Part(units[index], arrivals[index], self.moments[index]) for index in group], options) for group in groups]

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self._groups)

    def count(self, unused: Iterable[str]) -> None:
        """Counts an update of all groups which passes `unused` over."""
        self.steps += 1
        for name in unused:
            self.unused_steps[name] = self.unused_steps.get(name, 0) + 1

    def resume(self, steps: int, unused_steps: Mapping[str, int]) -> None:
        """Sets the number of updates so far, and how many of them have passed each parameter over."""
        self.steps, self.unused_steps = steps, dict(unused_steps)
        for group in self._groups:
            group.resume(steps, unused_steps)

    def update(self, group: int, update: Update) -> None:
        """Updates the units of this group; call it for group after group. Gradients are changed, and NaN if the step is skipped."""
        for coming in self._groups[group + 1 : group + 2] if group else self._groups[:2]:
            coming.start()
        self._groups[group].update(update)

    def live_tensors(self) -> list[Tensor]:
        """The tensors that hold optimizer state."""
        return [tensor for moments in self.moments for tensor in moments.values()]


class LaterUpdates:
    """The updates of the last step that have not been made. Call `finish` before main weights, moments or sums of gradients are read.

    An update that fails raises its error where it was needed; from then on every call raises a RuntimeError that names it as its cause.
    """

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        """groups: the units that are updated together, in the order of updates."""
        self._group_of = {unit: number for number, units in enumerate(groups) for unit in units}
        self._groups = len(groups)
        self._next_group: int  # of the step that was noted last
        self._update: Callable[[int], None] | None = None
        self._error: BaseException | None = None

    def check_finished(self) -> None:
        """Raises RuntimeError if an update is left: it would change main weights that have just been written."""
        if self._update is not None:
            raise RuntimeError("main weights were written before the last step's updates were made; call engine.finish_updates() first")

    def begin(self, update: Callable[[int], None]) -> None:
        """Notes a step whose updates are to be made. update: makes that of one group. Those of the step before must have been made."""
        self.finish()
        self._update, self._next_group = update, 0

    def reach(self, unit: str) -> None:
        """Makes the updates that are left, up to that of `unit`."""
        if self._update is not None and unit in self._group_of:  # nothing updates a frozen unit
            self._make(self._update, self._group_of[unit] + 1)

    def finish(self) -> None:
        """Makes all updates that are left."""
        if self._update is not None:
            self._make(self._update, self._groups)

    def _make(self, update: Callable[[int], None], stop: int) -> None:
        if self._error is not None:
            raise RuntimeError("an earlier update on the host failed, so the weights are those of no step") from self._error
        try:
            while self._next_group < stop:
                update(self._next_group)
                self._next_group += 1
        except BaseException as error:
            self._error = error
            raise
        if self._next_group == self._groups:
            self._update = None


@dataclass(frozen=True)
class _Part:
    """What AdamW reads and writes of one unit."""

    unit: WeightUnit
    arrival: Arrival
    moments: Mapping[str, Tensor]


class _Group:
    """Units that are updated together. adam: None if this rank has nothing of them to update."""

    def __init__(self, parts: Sequence[_Part], options: AdamOptions) -> None:
        self._parts = parts
        self._options = options
        self._names = frozenset(placed.spec.name for part in parts for placed in part.unit.layout.params)
        self._gradients = [piece for part in parts for piece in part.arrival.values.parts()]
        self.adam: Adam | None
        self.resume(0, {})

    def resume(self, steps: int, unused_steps: Mapping[str, int]) -> None:
        """Begins after `steps` updates, some of which have passed parameters over."""
        self._make_adam({name: steps - unused_steps.get(name, 0) for name in self._names}, frozenset())

    def _make_adam(self, steps: dict[str, int], unused: frozenset[str]) -> None:
        """Makes an optimizer that passes `unused` over. steps: by parameter, its number of updates so far."""
        self._first_steps, self._unused = steps, unused
        self._views: list[AdamView] = []
        alike: dict[tuple[bool, int], dict[nn.Parameter, dict[str, Tensor]]] = {}
        used = {name: updates for name, updates in steps.items() if name not in unused}
        for part in self._parts:
            for view in adam_views(part.unit, part.arrival.values, part.moments, used):
                alike.setdefault((view.decays, view.steps), {})[view.parameter] = view.moments
                self._views.append(view)
        groups = [AdamGroup(decays, updates, states) for (decays, updates), states in alike.items()]
        self.adam = make_adam(groups, self._options) if groups else None
        self._first = groups[0].steps if groups else 0

    def _steps(self) -> dict[str, int]:
        """By parameter of the group, its number of updates so far. The host waits for the device."""
        made = self.adam.steps[0] - self._first if self.adam is not None else 0
        return {name: steps + (made if name not in self._unused else 0) for name, steps in self._first_steps.items()}

    def start(self) -> None:
        """Sends the gradients on their way."""
        for part in self._parts:
            part.arrival.start()

    def update(self, update: Update) -> None:
        unused = update.unused & self._names
        if unused != self._unused:
            self._make_adam(self._steps(), unused)
        for part in self._parts:
            part.arrival.wait()
        if isinstance(update.factor, Tensor) or update.factor != 1.0:
            torch._foreach_mul_(self._gradients, update.factor)
        for view in self._views:
            view.before_update()
        if self.adam is not None:
            self.adam.update(update.learning_rate, update.weight_decay, update.skips)
        for view in self._views:
            view.after_update()


@dataclass(frozen=True)
class AdamView:
    """A range of a unit's main weights as a parameter with its gradient, and its moments.

    decays: whether its weights decay. steps: the number of its updates so far.
    copied: if the parameter and its moments are copies, the tensors of the unit. counts: the part of a copy that goes back to the unit.
    """

    parameter: nn.Parameter
    moments: dict[str, Tensor]
    decays: bool
    steps: int
    copied: tuple[Tensor, ...]
    counts: slice

    def before_update(self) -> None:
        """Fills copies."""
        for own, of_unit in self._copies():
            own.copy_(of_unit)

    def after_update(self) -> None:
        """Writes the elements that this view updates back to the unit."""
        for own, of_unit in self._copies():
            of_unit[self.counts] = own[self.counts]

    def _copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip((self.parameter.detach(), *self.moments.values()) if self.copied else (), self.copied, strict=True)


def adam_views(unit: WeightUnit, gradient: Regions, moments: Mapping[str, Tensor], steps: Mapping[str, int]) -> Iterator[AdamView]:
    """The views of a unit. steps: by parameter, the number of its updates so far; parameters without one are not updated.

    Parameters of one dimension share blocks. Where neighbours have had different numbers of updates, each gets a copy of its blocks.
    Raises UserError if weight decay changes where no block begins.
    """
    layout, slices = unit.layout, (unit.first_slice, unit.slices)
    for span, _ in layout.ranges_by(lambda segment: segment.spec.weight_decay, *slices):
        if span.start % layout.block_numel:
            raise UserError(
                f"unit {unit.name}: weight decay changes at element {span.start} of the slice, and AdamW's views begin at multiples of "
                f"{layout.block_numel}; give all parameters of one dimension the same weight decay"
            )
    states = (unit.main_weight, *moments.values())
    for part, (decays, updates) in layout.ranges_by(lambda segment: (segment.spec.weight_decay, steps.get(segment.spec.name)), *slices):
        if updates is None:
            continue
        blocks = slice(part.start // layout.block_numel * layout.block_numel, next_multiple(part.stop, layout.block_numel))
        is_copy = blocks != slice(part.start, part.stop)
        of_unit = tuple(state[blocks] for state in states)
        weight, *own = [state.clone() for state in of_unit] if is_copy else of_unit
        parameter = nn.Parameter(weight)
        parameter.grad = gradient.range(blocks.start, blocks.stop)
        counts = slice(part.start - blocks.start, part.stop - blocks.start)
        yield AdamView(parameter, dict(zip(moments, own, strict=True)), decays, updates, of_unit if is_copy else (), counts)
