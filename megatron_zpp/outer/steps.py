"""Outer steps: islands train by themselves for a while, then move their weights to where all of them together have come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from megatron_zpp.comm.code import EXACT, Code, LinkCodes
from megatron_zpp.comm.codecs import CastCodec, LinkCodecs
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.comm.links import Links
from megatron_zpp.outer.all_islands import AllIslands
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.unit import OuterCodecs, OuterUnit, outer_layout
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.engine import ZeroEngine, storage_bytes
from megatron_zpp.zero.policy import Rung

MOST_UNDER_WAY = 2  # exchanges; each holds the outer gradient of a unit until it has ended


class OuterSteps:
    """The outer steps of one rank, beside the engine of its island. join_islands() (outer/join.py) makes them for any module.

    Every rank of every island must make the same calls in the same order.
    engine: of the island. links: to the ranks that have the same place on the other islands. options: of the outer steps.
    units: the outer weights of each unit that is trained; None where this rank's slice has no element.
    everyone: the ranks of all islands.
    """

    def __init__(self, engine: ZeroEngine, links: Links, options: OuterOptions, on_close: Callable[[], None] | None = None) -> None:
        """on_close: ends what was made for the outer steps alone, such as process groups. `close` calls it.

        Raises UserError for an engine whose policy does not suit outer steps.
        """
        check_policy(engine)
        self.engine = engine
        self.links = links
        self.options = options
        self.everyone = AllIslands(engine.links.backend, links.backend, engine.world_size)
        self._on_close = on_close
        self._is_closed = False
        engine.finish_updates()
        self._codecs = OuterCodecs(self._codecs_of(options.gradient_code), self._codecs_of(options.difference_code))
        self._exact = OuterCodecs(self._codecs_of(EXACT), self._codecs_of(EXACT))
        self._exchanged = engine.iteration  # the number of inner steps at the last exchange
        self._late: list[int] = []  # the units whose exchange ends after the next inner step, by number
        self.units = [self._make_unit(index) for index in range(len(engine.trained))]
        engine.is_joined = True

    def _codecs_of(self, code: Code) -> LinkCodecs:
        """The codecs of a hop between islands. One island alone keeps its values as they are."""
        own = self.engine.options
        if self.islands == 1:
            return LinkCodecs(CastCodec(own.dtype), CastCodec(own.dtype))
        return LinkCodecs.of(LinkCodes(code, code), own.dtype, own.block_numel, own.noise_seed, own.make_codec)

    def _make_unit(self, index: int) -> OuterUnit | None:
        inner = self.engine.trained[index]
        layout = outer_layout(inner.layout, inner.first_slice, self.islands)
        return None if layout is None else OuterUnit(inner, layout, self.links, self.options, self.engine.options.dtype)

    @property
    def island(self) -> int:
        """The island of this rank, one of `islands`."""
        return self.links.data_rank

    @property
    def islands(self) -> int:
        """The number of islands."""
        return self.links.topology.data_ranks

    @property
    def data_rank(self) -> int:
        """This rank among the `data_ranks` of all islands."""
        return self.island * self.engine.data_ranks + self.engine.data_rank

    @property
    def data_ranks(self) -> int:
        """The number of ranks, on all islands, among which a batch is divided."""
        return self.islands * self.engine.data_ranks

    def step(self) -> None:
        """Exchanges the units that are due. Call it after every step of the engine; before the next one a second call does nothing.

        An exchange is under way until its unit is needed: in the next forward, or where weights are saved, loaded or evaluated. With
        `overlap_steps` those of at most two units are under way until the next call, which writes their inner weights.
        Raises RuntimeError between a backward and the step of the engine that follows.
        """
        self._check_between_steps()
        if self._exchanged == self.engine.iteration:
            return
        self.exchange(self.due, takes_means=self.options.takes_means(self.engine.iteration))

    @property
    def due(self) -> list[int]:
        """The units that are exchanged after as many inner steps as are done, by number."""
        is_due = self.options.is_due([unit.layout.numel for unit in self.engine.trained], self.engine.iteration)
        return [index for index, is_due_now in enumerate(is_due) if is_due_now]

    def take_means(self) -> None:
        """Gives every island the mean of the inner weights of all, as at the end of a run: what they have learned since they last agreed.

        Outer momentum stays as it is. Raises RuntimeError between a backward and the step of the engine that follows.
        """
        self._check_between_steps()
        self.exchange(range(len(self.units)), takes_means=True)

    def exchange(self, due: Sequence[int], *, takes_means: bool = False) -> None:
        """Ends what is late and exchanges these units, by number, whether they are due or not."""
        engine, iteration = self.engine, self.engine.iteration
        for index in self._late:
            engine.finish_update(engine.trained[index])
        self._finish_late()
        self._exchanged = iteration
        codecs = self._exact if iteration <= engine.options.full_precision_iterations else self._codecs
        for place, index in enumerate(due):
            if place >= MOST_UNDER_WAY:
                self._finish(due[place - MOST_UNDER_WAY])
            engine.finish_update(engine.trained[index])
            for unit in self._units_at([index]):
                unit.begin(codecs, iteration, takes_mean=takes_means)
        last = list(due[-MOST_UNDER_WAY:])
        if self.options.overlap_steps and not takes_means:
            self._delay(last)
        else:
            for index in last:
                engine.write_before_use(engine.trained[index], partial(self._finish, index))

    def _delay(self, late: Sequence[int]) -> None:
        for unit in self._units_at(late):
            unit.keep_step()
        self._late = list(late)

    def _finish_late(self) -> None:
        for index in self._late:
            self._finish(index)
        self._late = []

    def _finish(self, index: int) -> None:
        inner = self.engine.trained[index]
        inner.finish_climbs()  # which read x
        for unit in self._units_at([index]):
            self._book(unit.finish())
        inner.replace()  # also where this rank has no element of it: all ranks of the island must climb alike

    def _book(self, traffic: Traffic) -> None:
        self.engine.links.ledger.book(Category.OUTER, traffic)

    def _units_at(self, indices: Iterable[int]) -> Iterator[OuterUnit]:
        """The units with these numbers of which this rank has elements."""
        return filter(None, (self.units[index] for index in indices))

    @property
    def late_parameters(self) -> list[str]:
        """The parameters whose inner weights get an exchange after the next inner step."""
        return [placed.spec.name for index in self._late for placed in self.engine.trained[index].layout.params]

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Gives the engine the outer weights, in the precision in which islands share them, for an evaluation or full_weights().

        They are the same on every island, and no byte crosses between islands. Inner weights wait in the sums of gradients meanwhile, and
        the training goes on with the same bits. Raises RuntimeError between a backward and the step of the engine that follows; in the
        block, steps and exchanges raise it.
        """
        self.check_open()
        engine = self.engine
        with engine.gradients_lent() as places:
            for inner, place in zip(engine.trained, places, strict=True):
                place.copy_(inner.main_regions())
            for inner, unit in zip(engine.trained, self.units, strict=True):
                inner.finish_climbs()  # which read x
                if unit is not None:
                    unit.write_copy()
            engine.weights_changed()
            try:
                yield
            finally:
                for inner, place in zip(engine.trained, places, strict=True):
                    inner.finish_climbs()
                    inner.main_regions().copy_(place)
                engine.weights_changed()

    def check_open(self) -> None:
        """Raises RuntimeError within a step of the engine, and if it or this is closed. Then no update is left, and nothing crosses."""
        self._check_between_steps()
        self.engine.finish_updates()
        for unit in self._units_at(self._late):
            self._book(unit.wait())

    def check_stepped(self) -> None:
        """Raises RuntimeError if the last step of the engine has had no exchange yet: a run that is resumed would leave it out."""
        if self._exchanged != self.engine.iteration:
            raise RuntimeError(f"step {self.engine.iteration} has had no exchange; call the step() of the outer steps before a save")

    def _check_between_steps(self) -> None:
        if self._is_closed:
            raise RuntimeError("the outer steps are closed")
        self.engine.check_between_steps()

    def resume(self, *, from_inner: bool, late_parameters: Collection[str] = ()) -> None:
        """Goes on with weights that were loaded: outer weights, momentum and copies, or the inner weights alone.

        from_inner: outer weights are the inner ones, which have the same values on every island, and there is no momentum.
        late_parameters: as they were when the weights were saved. A unit is late if one of its parameters is.
        """
        self._exchanged, self._late = self.engine.iteration, []
        for unit in filter(None, self.units):
            self._book(unit.forget())
            if from_inner:
                unit.start_from_inner()
        trained = enumerate(self.engine.trained)
        late = [index for index, inner in trained if any(placed.spec.name in late_parameters for placed in inner.layout.params)]
        if self.options.overlap_steps:
            self._delay(late)
            return
        for index in late:
            self._finish(index)

    def state_bytes(self) -> int:
        """Bytes of outer weights, momentum and copies on this rank."""
        return storage_bytes([tensor for unit in self.units if unit is not None for tensor in unit.live_tensors()])

    def close(self) -> None:
        """Ends what was made for outer steps alone. Every rank must call it, before it closes the engine."""
        if self._is_closed:
            return
        try:
            self.engine.finish_updates()
            self._finish_late()
        finally:
            self._is_closed, self.engine.is_joined = True, False
            if self._on_close is not None:
                self._on_close()


def check_policy(engine: ZeroEngine) -> None:
    """Raises UserError if outer steps cannot read or write the main weights as this engine keeps them."""
    policy, ranks = engine.options.policy, engine.links.topology.data_ranks
    if policy.optimizer is Rung.FULL and ranks > 1:
        raise UserError(
            f"outer steps divide what a rank updates among the islands, and in stage 0 each of the {ranks} ranks of an island updates all "
            "weights; choose ZeRO stage 1, 2 or 3"
        )
    if engine.keeps_copies:
        raise UserError(
            "outer steps write weights, and the policy (lean) adds differences to copies that it keeps between the nodes of an island; "
            "choose another policy, or islands of one node"
        )
