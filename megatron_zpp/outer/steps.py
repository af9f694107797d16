"""Outer steps: islands train by themselves for a while, then move their weights to where all of them together have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from megatron_zpp.comm.code import EXACT, Code, LinkCodes
from megatron_zpp.comm.codecs import LinkCodecs
from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.links import Links
from megatron_zpp.outer.all_islands import AllIslands
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.unit import OuterCodecs, OuterUnit, outer_layout
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.engine import ZeroEngine
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
        self._on_close = on_close
        engine.finish_updates()
        self.everyone = AllIslands(engine.links.backend, links.backend, engine.world_size)
        self._codecs = OuterCodecs(*(self._codecs_of(code) for code in (options.gradient_code, options.difference_code)))
        self.units = [self._make_unit(index) for index in range(len(engine.trained))]

    def _codecs_of(self, code: Code) -> LinkCodecs:
        """The codecs of a hop between islands; the values of one island alone stay as they are."""
        own = self.engine.options
        codes = LinkCodes(code, EXACT).in_world(self.links.topology)
        return LinkCodecs.of(codes, own.dtype, own.block_numel, own.noise_seed, own.make_codec)

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

    def step(self, *, all_units: bool = False) -> None:
        """Exchanges the units that are due, and waits. Call it after every step of the engine.

        all_units: exchanges every unit, due or not, as at the end of a run: what islands have learned since is then in the outer weights.
        Raises RuntimeError between a backward and the step of the engine that follows.
        """
        engine = self.engine
        engine.check_between_steps()
        engine.finish_updates()
        numels = [unit.layout.numel for unit in engine.trained]
        due = [unit for unit, is_due in zip(self.units, self.options.is_due(numels, engine.iteration), strict=True) if is_due or all_units]
        self._exchange([unit for unit in due if unit is not None])

    def _exchange(self, due: Sequence[OuterUnit]) -> None:
        under_way: deque[OuterUnit] = deque()
        for unit in due:
            if len(under_way) == MOST_UNDER_WAY:
                self._finish(under_way.popleft())
            unit.begin(self._codecs, self.engine.iteration)
            under_way.append(unit)
        while under_way:
            self._finish(under_way.popleft())

    def _finish(self, unit: OuterUnit) -> None:
        self.engine.links.ledger.book(Category.OUTER, unit.finish())
        self.engine.weights_changed(units=[unit.inner])

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Gives the engine the outer weights, in the precision in which islands share them, for an evaluation or full_weights().

        They are the same on every island, and no byte crosses between islands. Inner weights wait in the sums of gradients meanwhile, and
        the training goes on with the same bits. Do not train in this context. Raises RuntimeError between a backward and the step of the
        engine that follows.
        """
        engine = self.engine
        engine.check_between_steps()
        engine.finish_updates()
        stored = [(unit, gradient.primary) for unit, gradient in zip(engine.trained, engine.gradients, strict=True)]
        for inner, place in stored:
            place.copy_(inner.main_regions())
        for unit in self.units:
            if unit is not None:
                unit.write_copy()
        engine.weights_changed()
        try:
            yield
        finally:
            for inner, place in stored:
                inner.finish_climbs()
                inner.main_regions().copy_(place)
                for part in place.parts():
                    part.zero_()  # an update before the first backward takes them for gradients
            engine.weights_changed()

    def start_from_inner(self) -> None:
        """Starts from the inner weights, without momentum. They must have the same values on every island, as after a load."""
        self.engine.finish_updates()
        for unit in filter(None, self.units):
            unit.start_from_inner()

    def state_bytes(self) -> int:
        """Bytes of outer weights, momentum and copies on this rank."""
        tensors: list[Tensor] = [tensor for unit in self.units if unit is not None for tensor in unit.live_tensors()]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def close(self) -> None:
        """Ends what was made for outer steps alone. Every rank must call it, before it closes the engine."""
        self.links.lanes.drain()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None


def check_policy(engine: ZeroEngine) -> None:
    """Raises UserError if outer steps cannot read or write the main weights as this engine keeps them."""
    policy, ranks = engine.options.policy, engine.links.topology.data_ranks
    if policy.optimizer is Rung.HOST:
        raise UserError("outer steps need main weights on the device, and the policy keeps them on the host; choose one without offload")
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
