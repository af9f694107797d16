"""Islands that are joined: in real processes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.islands import Member, join, run_islands, small_module
from harness.rank_pool import RankPool
from harness.worlds import run_world
from torch import Tensor, nn

from megatron_zpp.checkpoint.sharded_module import load, save
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.codecs import make_codec
from megatron_zpp.comm.ledger import Category
from megatron_zpp.outer.join import join_islands
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.unit import OuterUnit
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import LEAN, POLICIES
from megatron_zpp.zero.shard import leave_world, shard

IN_BF16 = EngineOptions(POLICIES[3], dtype=torch.bfloat16)
PERIOD_OF_2 = OuterOptions(2)


def trained(member: Member) -> tuple[list[float], Tensor, int]:
    """Losses, outer weights, and the bytes that have come from other islands."""
    losses = []
    for step in range(5):
        losses.append(member.train(step))
        member.outer.step()
    with member.outer.outer_weights():
        weights = member.weights()
    return losses, weights, member.engine.links.ledger.total(Category.OUTER).inter_bytes


def trained_in_processes(islands: int) -> tuple[list[float], list[float], int, tuple[int, int, int, int]]:
    dist.init_process_group("gloo")
    module = small_module()
    engine = shard(module, [name for name, _ in module.named_children()], IN_BF16, islands=islands)
    outer = join_islands(engine, PERIOD_OF_2)
    losses, weights, nbytes = trained(Member(engine, outer))
    places = (outer.island, outer.islands, outer.data_rank, engine.world_size)
    outer.close()
    engine.close()
    leave_world()
    return losses, weights.tolist(), nbytes, places


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "islands"), [(2, 2, 2), (1, 4, 2), (2, 2, 4)], ids=["nodes", "half of a node", "ranks"]
)
def test_processes_have_the_bits_and_bytes_of_threads(nodes: int, ranks_per_node: int, islands: int, ranks: RankPool) -> None:
    found = ranks.run(nodes, ranks_per_node, trained_in_processes, islands)
    of_island = 4 // islands
    for rank, (expected, of_process) in enumerate(zip(run_islands(islands, of_island, trained, IN_BF16, PERIOD_OF_2), found, strict=True)):
        assert of_process == (expected[0], expected[1].tolist(), expected[2], (rank // of_island, islands, rank, of_island))


def saved_and_loaded(folder: Path, *, stops: bool) -> list[float]:
    """The last losses of a run of processes, which saves in the middle and goes on with other engines if it stops there."""
    dist.init_process_group("gloo")
    losses = []
    for first, last in ((0, 3), (3, 6)) if stops else ((0, 6),):
        module = small_module()
        engine = shard(module, [name for name, _ in module.named_children()], IN_BF16, islands=2)
        member = Member(engine, join_islands(engine, PERIOD_OF_2))
        if first:
            assert load(engine, folder, outer=member.outer).step == first
        for step in range(first, last):
            losses.append(member.train(step))
            member.outer.step()
        if stops:
            save(engine, folder, outer=member.outer)
        member.outer.close()
        engine.close()
    leave_world()
    return losses[3:]


@pytest.mark.gloo
def test_processes_on_islands_go_on_from_one_checkpoint_with_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    unbroken, resumed = (ranks.run(2, 2, partial(saved_and_loaded, stops=stops), tmp_path) for stops in (False, True))
    assert resumed == unbroken


@pytest.mark.gloo
def test_an_island_of_two_nodes_has_links_between_them(ranks: RankPool) -> None:
    assert ranks.run(4, 1, grid_of_an_island, 2) == [Grid(2, 1, 1)] * 4


def grid_of_an_island(islands: int) -> Grid:
    dist.init_process_group("gloo")
    engine = shard(_one_linear(), ["0"], islands=islands)
    grid = engine.links.grid
    engine.close()
    leave_world()
    return grid


def _one_linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 2))


def refusal(islands: Any, **arguments: Any) -> str:
    dist.init_process_group("gloo")
    try:
        shard(_one_linear(), ["0"], islands=islands, **arguments)
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "no error"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "islands", "finding"),
    [
        (1, 2, 3, "islands is 3, which does not divide the 2 ranks; choose 1 or 2"),
        (1, 2, 0, "islands is 0, which does not divide the 2 ranks; choose 1 or 2"),
        (1, 2, True, "islands is True, which does not divide the 2 ranks; choose 1 or 2"),
        (2, 3, 3, "islands is 3, and the 2 ranks of each are neither whole nodes of 3 ranks nor an equal part of one; choose 1, 2 or 6"),
    ],
)
def test_islands_that_ranks_or_nodes_do_not_divide_into_are_refused_with_those_that_would_do(
    nodes: int, ranks_per_node: int, islands: int, finding: str, ranks: RankPool
) -> None:
    for said in ranks.run(nodes, ranks_per_node, refusal, islands):
        assert finding in said


def refused(islands: int, ranks: int, program: Any) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        run_world((islands, ranks), program)
    return str(error.value)


@pytest.mark.virtual
def test_a_backend_is_that_of_one_island() -> None:
    said = refused(2, 1, lambda backend: shard(small_module(), ["0"], islands=2, backend=backend))
    assert said == "islands is 2, and a backend is that of one island; leave `islands` out"


@pytest.mark.virtual
def test_islands_that_have_other_weights_are_told_so_on_every_rank() -> None:
    said = []

    def program(backend: VirtualBackend) -> None:
        module = small_module()
        with torch.no_grad():
            next(module.parameters()).add_(float(backend.rank // 2))
        try:
            join(module, *backend.on_islands(2), EngineOptions(), OuterOptions())
        except ValueError as error:
            said.append(str(error))

    run_world((2, 2), program)
    assert len(said) == 4
    assert all("the main weights of islands [1] differ from those of island 0; give every island the same" in text for text in said)


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("engine_options", "options"),
    [
        (EngineOptions(), OuterOptions(period=4)),
        (EngineOptions(POLICIES[0]), OuterOptions()),
        (EngineOptions(noise_seed=1), OuterOptions()),
        (IN_BF16, OuterOptions()),
        (replace(EngineOptions(), make_codec=lambda *arguments: make_codec(*arguments)), OuterOptions()),
    ],
    ids=["period", "policy", "seed", "dtype", "codecs"],
)
def test_islands_with_other_options_are_told_so_on_every_rank(engine_options: EngineOptions, options: OuterOptions) -> None:
    said = []

    def program(backend: VirtualBackend) -> None:
        own = (engine_options, options) if backend.rank // 2 else (EngineOptions(), OuterOptions())
        try:
            join(small_module(), *backend.on_islands(2), *own)
        except ValueError as error:
            said.append(str(error))

    run_world((2, 2), program)
    assert len(said) == 4
    assert all("options of outer steps, or of engines, of ranks [2, 3] differ from those of rank 0" in text for text in said)


def groups_after_an_error_on_rank_1() -> tuple[str, int]:
    """What is said on this rank, and how many process groups are left of what was made to join."""
    dist.init_process_group("gloo")
    module = small_module()
    engine = shard(module, [name for name, _ in module.named_children()], islands=2)
    before = len(dist.distributed_c10d._world.pg_map)
    said = ""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(OuterUnit, "__init__", _no_memory)
        try:
            join_islands(engine)
        except (ValueError, MemoryError) as error:
            said = repr(error)
    left = len(dist.distributed_c10d._world.pg_map) - before
    engine.close()
    leave_world()
    return said, left


def _no_memory(*_: object) -> None:
    raise MemoryError("no room")


@pytest.mark.gloo
def test_an_error_on_one_rank_is_told_on_those_of_all_islands_and_leaves_no_group(ranks: RankPool) -> None:
    for rank, (said, left) in enumerate(ranks.run(2, 2, groups_after_an_error_on_rank_1)):
        assert said == ("MemoryError('no room')" if rank == 1 else "UserError(\"MemoryError('no room') (on rank 1)\")")
        assert left == 0


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("options", "finding"),
    [
        (EngineOptions(POLICIES[0]), "in stage 0 each of the 2 ranks of an island updates all weights; choose ZeRO stage 1, 2 or 3"),
        (replace(EngineOptions(), block_numel=32), "choose a multiple of 256"),
    ],
    ids=["stage 0", "small blocks"],
)
def test_engines_that_do_not_suit_are_refused(options: EngineOptions, finding: str) -> None:
    with pytest.raises(ValueError, match=finding):
        run_islands(2, 2, lambda member: None, options)


@pytest.mark.virtual
def test_lean_between_the_nodes_of_an_island_is_refused() -> None:
    def program(backend: VirtualBackend) -> None:
        island, place = divmod(backend.rank, 2)
        of_island = backend.part(Grid.of_nodes(2, 1), range(2 * island, 2 * island + 2))
        column = backend.part(Grid.of_nodes(2, 1), range(place, 4, 2))
        join(small_module(), of_island, column, EngineOptions(LEAN), OuterOptions())

    assert "between the nodes of an island; choose another policy, or islands of one node" in refused(4, 1, program)


@pytest.mark.virtual
def test_lean_inside_of_a_node_needs_no_copies_and_is_joined() -> None:
    run_islands(2, 2, lambda member: member.outer.take_means(), EngineOptions(LEAN, dtype=torch.bfloat16))
