"""The ZeRO engine: shards a model's units, gathers their weights before each use, and reduces their gradients.

It reads one row of the policy table and one schedule. It never asks which ZeRO stage is running.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.links import Links
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.gradient_progress import GradientProgress
from megatron_zpp.zero.gradients import UnitGradient
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.loss_scaler import ConstantLossScaler, LossScaler
from megatron_zpp.zero.optimizer import ShardedAdamW, Update
from megatron_zpp.zero.optimizer_step import OptimizerStep, Refuses, StepResult, never
from megatron_zpp.zero.policy import Rung
from megatron_zpp.zero.schedule import training_schedule, update_groups
from megatron_zpp.zero.training_pass import TrainingPass
from megatron_zpp.zero.unit import WeightUnit


@dataclass(frozen=True)
class StateBytes:
    """Bytes of weights, gradients and optimizer state. host: those in the memory of the host, if the optimizer's state is kept there."""

    device: int
    host: int


class ZeroEngine:
    """One rank's part of a sharded model.

    Every rank must make the same calls in the same order. shard() makes an engine for any module (zero/shard.py).
    module: its parameters may be on the meta device; each is replaced by an nn.Parameter of its unit.
    units: of this rank, in the order of `unit_specs`. trained: those that are not frozen. gradients: of the trained units, in order.
    options: with the policy of this world. is_joined: whether outer steps join this engine with those of other islands (outer/steps.py).
    """

    def __init__(
        self,
        module: nn.Module,
        unit_specs: Sequence[UnitSpec],
        uses: Sequence[Use],
        options: EngineOptions,
        links: Links,
        loss_scaler: LossScaler | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """on_close: ends what was made for this engine alone, such as process groups. `close` calls it."""
        self.module = module
        self.links = links
        self.options = replace(options, policy=options.policy.in_world(links.topology))
        self.units: list[WeightUnit] = []
        self.gradients: list[UnitGradient] = []
        self._home = links.home(is_host=self.options.policy.optimizer is Rung.HOST)
        for spec in unit_specs:
            self._add_unit(spec)
        self.trained = [unit for unit in self.units if unit.trains]
        schedule = training_schedule(uses, options.prefetch)
        groups = update_groups([unit.name for unit in self.trained], schedule.values(), at_once=self._home.runs_behind)
        self.optimizer = ShardedAdamW(self.trained, self.gradients, groups, options.adam, self._home.link)
        self._writes: dict[str, Callable[[], None]] = {}  # by unit, in the order in which they were noted
        self._progress = GradientProgress()
        parts = (self.units, self.gradients, self.options, links)
        self._pass = TrainingPass(module, uses, schedule, *parts, self._progress, before_climb=self._reach)
        self._step = OptimizerStep(*parts, self.optimizer, self._home, self._pass, loss_scaler or ConstantLossScaler())
        self.is_joined = False
        self._on_close = on_close
        self._is_closed = False

    def _add_unit(self, spec: UnitSpec) -> None:
        links, options = self.links, self.options if spec.trains else self.options.for_frozen()
        layout = FlatLayout(spec.params, links.topology.data_ranks, options.block_numel)
        weight_codecs, gradient_codecs = options.codecs(iteration=0)
        unit = WeightUnit(spec, layout, options.policy, links, self._home, weight_codecs, options.dtype)
        for parameter, placed in zip(unit.parameters, layout.params, strict=True):
            owner, _, attribute = placed.spec.name.rpartition(".")
            setattr(self.module.get_submodule(owner), attribute, parameter)
        self.units.append(unit)
        if spec.trains:
            self.gradients.append(UnitGradient(spec.name, layout, options.policy, links, gradient_codecs, options.dtype))

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.links.device

    @property
    def rank(self) -> int:
        """This process, one of `world_size`."""
        return self.links.backend.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.links.grid.world_size

    @property
    def data_rank(self) -> int:
        """This rank of its ladder, one of `data_ranks`."""
        return self.links.data_rank

    @property
    def data_ranks(self) -> int:
        """The number of ranks among which a batch is divided."""
        return self.links.topology.data_ranks

    @property
    def loss_scaler(self) -> LossScaler:
        """That of the constructor."""
        return self._step.loss_scaler

    @property
    def iteration(self) -> int:
        """The number of steps done."""
        return self._step.iteration

    # ---- a step

    def backward(self, loss: Tensor, *, microbatches: int = 1, is_last_microbatch: bool = True) -> None:
        """Adds the gradients of one micro-batch. loss: its mean loss. microbatches: how many there are in this step.

        is_last_microbatch: whether this is the last one of the step. Raises RuntimeError for a micro-batch after the last one, UserError
        if `microbatches` is no number of 1 or more.
        """
        self.check_open()
        if not 1 <= microbatches < math.inf:
            raise UserError(f"microbatches is {microbatches}; give the number of micro-batches in this step, 1 or more")
        self.finish_updates()  # those that are left read the sums of gradients that this backward overwrites
        self._pass.backward(loss * (self.loss_scaler.scale / microbatches), is_last_microbatch=is_last_microbatch)

    def step(self, learning_rate: float, weight_decay: float | None = None) -> StepResult:
        """One optimizer step: `finish_gradients`, then `update`."""
        self.finish_gradients()
        return self.update(learning_rate, weight_decay)

    def finish_gradients(self) -> None:
        """Waits until every descent has landed, makes equal what tensor ranks share, and sets padding to zero.

        Every rank must call it after the last backward, before `update`; a second call in a step does nothing. Raises RuntimeError if no
        micro-batch of this step was the last.
        """
        self.check_open()
        if self._progress.is_mean_missing():
            self._step.finish_gradients()
            self._progress.end_mean()

    def update(
        self, learning_rate: float, weight_decay: float | None = None, report: Tensor | None = None, refuses: Refuses = never
    ) -> StepResult:
        """Updates the weights with the clipped mean gradient. A NaN or inf in it makes every rank skip the update.

        weight_decay: of this step; by default that of the options. report: [numel] fp64, numbers that ranks exchange in the message of the
        norm; every rank must give as many. refuses: called with the reports of all ranks, [world_size, numel]; returns [] bool, the same on
        every rank, or None. If it is true, the update is skipped as if the norm were NaN. Raises RuntimeError if `finish_gradients` has not
        been called after the last backward, UserError for a learning rate or weight decay that is negative or not finite.
        """
        self.check_open()
        self._progress.begin_update()
        update = Update(learning_rate, self.options.adam.weight_decay if weight_decay is None else weight_decay)
        result = self._step.run(update, report, refuses)
        self._progress.end_update()
        return result

    def check_between_steps(self) -> None:
        """Raises RuntimeError if the engine is closed, or gradients have come that no update has used."""
        self.check_open()
        self._progress.check_used()

    @contextmanager
    def gradients_lent(self) -> Iterator[list[Regions]]:
        """A block in which this rank's own slices of the sums of gradients, one for each trained unit, may hold anything.

        Raises RuntimeError within a step. In the block no backward and no step are made.
        """
        self.check_open()
        self._progress.lend()
        lent = [gradient.primary for gradient in self.gradients]
        try:
            yield lent
        finally:
            for part in (part for regions in lent for part in regions.parts()):
                part.zero_()  # an update before the first backward takes them for gradients
            self._progress.take_back()

    def finish_updates(self) -> None:
        """Makes the updates that wait for the next forward. Call it before main weights or moments are read or written."""
        self.optimizer.later.finish()
        while self._writes:
            self._writes.pop(next(iter(self._writes)))()

    def finish_update(self, unit: WeightUnit) -> None:
        """Does what is left to do to the main weights of a unit: its update, with those before it, and a write that was noted.

        Call it before they are read or written between two steps.
        """
        self.check_between_steps()
        self._reach(unit.name)

    def write_before_use(self, unit: WeightUnit, write: Callable[[], None]) -> None:
        """Has `write` change the main weights of a unit before they are used next, in `finish_updates` at the latest.

        Noted between two steps. So what brings the new weights can be under way while units before this one compute.
        """
        self.check_between_steps()
        self._writes[unit.name] = write

    def _reach(self, unit: str) -> None:
        """Does what is to be done before a unit climbs."""
        self.optimizer.later.reach(unit)
        if unit in self._writes:
            self._writes.pop(unit)()

    def weights_changed(self, *, copies_are_filled: bool = False) -> None:
        """Marks the weights on every rung as stale. Call it after any write to the main weights.

        copies_are_filled: whether this rank's slices of copies that are kept across steps have been written as well. Otherwise they are
        taken from the main weights. Raises RuntimeError if updates were not finished before the write: they would change what was written.
        """
        self.optimizer.later.check_finished()
        self._pass.end_step()
        for unit in self.units:
            unit.replace(copy_is_filled=copies_are_filled)

    @property
    def keeps_copies(self) -> bool:
        """Whether copies of the weights are kept across steps, to which differences are added."""
        return self.options.policy.keeps_copy

    def finish_differences(self) -> None:
        """Finishes updates, adds their differences to kept copies, and waits. Every rank must call it, before a save."""
        self.finish_updates()
        if not self.keeps_copies:
            return
        for unit in self.units:
            unit.climb(self.options.policy.weights_in_step)
            if self.options.policy.weights_in_step is Rung.FULL:
                unit.wait(Category.WEIGHTS)  # one by one: until its full rung has landed, a unit also holds a secondary one
        for unit in self.units:
            unit.finish_climbs()

    def start_iteration(self, iteration: int) -> None:
        """Sets the number of steps done; full precision begins or ends with it. A resumed run calls it before its first step."""
        self._step.start_iteration(iteration)

    def state_bytes(self) -> StateBytes:
        """Bytes that weights, gradients and optimizer state take now, on this rank's device and on its host."""
        at_home = [tensor for unit in self.units for tensor in unit.tensors_at_home()] + self.optimizer.live_tensors()
        others = [tensor for unit in self.units for tensor in unit.live_tensors()] + [gradient.total for gradient in self.gradients]
        others += [parameter.grad for unit in self.units for parameter in unit.parameters if parameter.grad is not None]
        return (
            StateBytes(storage_bytes(others), storage_bytes(at_home))
            if self._home.is_host
            else StateBytes(storage_bytes(others + at_home), 0)
        )

    def gather_world(self, own: Tensor) -> Tensor:
        """`own` [numel] of every rank, [data ranks, tensor ranks, numel]; for a few numbers. Every rank must call it."""
        return self.links.gather_world(own)

    def weight_norm(self) -> float:
        """The L2 norm of all main weights; every rank must call it."""
        self.finish_updates()
        return self._step.weight_norm()

    def close(self) -> None:
        """Finishes updates, and waits for climbs that were submitted ahead, so that no message is under way when the process groups end.

        It removes the hooks, because the module and autograd would keep the engine alive through them. A forward of the module after it
        raises RuntimeError. Every rank must call it. If a part of it fails, the others are done, and `on_close` is left out.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.finish_updates()
        except BaseException as error:
            try:
                self._pass.close()
            except BaseException:
                raise error  # noqa: B904  the later error becomes its context
            raise
        self._pass.close()
        if self._on_close is not None:
            self._on_close()

    def check_open(self) -> None:
        """Raises RuntimeError if the engine is closed."""
        if self._is_closed:
            raise RuntimeError("the engine is closed")


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of these tensors; one that several of them share counts once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
