"""Islands of a virtual world that the flags of the training script ask for: model, engine and outer steps of each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from harness.live_rank import Held, LiveLanes, LiveStorages, held_in_steps
from harness.worlds import TurnLanes, run_world
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.islands import ranks_of_columns, ranks_of_islands
from megatron_zpp.training import setup
from megatron_zpp.training.sharding import column_grid, grid_of
from testbed.session import LEARNING_RATE, RankPlace, Session

Result = TypeVar("Result")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class IslandFlags:
    """Flags of a run on islands. flags: those that a run on one island alone has, too. outer: --diloco-* and what only the world needs.

    nodes, ranks_per_node: of all islands.
    """

    flags: str
    outer: str
    nodes: int
    ranks_per_node: int

    @property
    def config(self) -> Config:
        return resolve(parse_flags(f"{self.flags} {self.outer}".split()), self.nodes * self.ranks_per_node, self.ranks_per_node)

    @property
    def grid(self) -> Grid:
        """Of one island."""
        return grid_of(self.config, self.nodes * self.ranks_per_node)


class IslandRank:
    """One rank: its run on its island, and its outer steps. live: counts its memory."""

    def __init__(self, flags: IslandFlags, backend: VirtualBackend, live: LiveStorages | None = None) -> None:
        config, world_size = flags.config, flags.nodes * flags.ranks_per_node
        island, place = divmod(backend.rank, flags.grid.world_size)
        of_island = backend.part(flags.grid, ranks_of_islands(world_size, config.diloco.diloco_islands)[island])
        across = backend.part(column_grid(config), ranks_of_columns(world_size, config.diloco.diloco_islands)[place])
        lanes, lanes_across = (TurnLanes() if live is None else LiveLanes(live) for _ in range(2))
        self.session = Session(f"{flags.flags} --ranks-per-node {flags.ranks_per_node}", RankPlace(of_island, lanes, CPU))
        self.engine = self.session.engine
        column = Links(across, lanes_across, Ledger(across.grid, across.rank), CPU)
        outer = setup.build_outer(config, self.engine, column)
        assert outer is not None
        self.outer: OuterSteps = outer

    def close(self) -> None:
        self.outer.close()
        self.session.close()


def run_islands_of(flags: IslandFlags, program: Callable[[IslandRank], Result]) -> list[Result]:
    """What `program` returns on each rank, island after island."""

    def run(backend: VirtualBackend) -> Result:
        rank = IslandRank(flags, backend)
        result = program(rank)
        rank.close()
        return result

    return run_world((flags.nodes, flags.ranks_per_node), run)


def held_by_islands(flags: IslandFlags) -> list[Held]:
    """The most memory of each rank in a step with the exchanges that it ends and those that it begins. states: with outer ones."""

    def program(backend: VirtualBackend) -> Held:
        with LiveStorages() as live:
            rank = IslandRank(flags, backend, live)

            def update() -> None:
                rank.engine.update(LEARNING_RATE)
                rank.outer.step()

            held = held_in_steps(live, rank.engine, rank.session.forward_backward, update, rank.close)
            return Held(held.peak, held.peak_beside_buffers, held.states + rank.outer.state_bytes(), held.staging)

    return run_world((flags.nodes, flags.ranks_per_node), program)
