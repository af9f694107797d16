"""Weights that are kept across steps as a copy, to which coded differences are added."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from harness.codes import lean
from harness.small_engine import LEARNING_RATE, Job, ModelShape, Rank, random_pauses, train_world
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import EXACT, Code, LinkCodes
from megatron_zpp.comm.codec import Codec, Regions
from megatron_zpp.comm.codecs import CastCodec
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.metrics import StepTraffic
from megatron_zpp.zero.policy import (
    POLICIES,
    Policy,
    with_gradients_summed_on_secondary,
    with_secondary_weights,
    with_weight_differences,
)
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

BLOCK = 256
E3 = Code.gaussian(3, rounds=1)
SHARED = with_gradients_summed_on_secondary(lean(3))


def job(policy: Policy, **changes: object) -> Job:
    return dataclasses.replace(Job(policy, torch.bfloat16, ModelShape((17, 40), is_tied=False), block_numel=BLOCK), **changes)  # type: ignore[arg-type]


# ---- what a copy holds


@dataclass(frozen=True)
class GridCodec(CastCodec):
    """Rounds values to multiples of 1/64, so that a test can say what a difference becomes."""

    def encode_into(self, values: Regions, payloads: Tensor) -> None:
        super().encode_into(Regions(on_grid(values.blocks), values.exact), payloads)


def on_grid(values: Tensor) -> Tensor:
    return torch.round(values * 64) / 64


def with_grid_codec(code: Code, dtype: torch.dtype, block_numel: int) -> Codec:
    return CastCodec(dtype) if code.is_exact else GridCodec(torch.float32)


@dataclass(frozen=True)
class Held:
    """What one rank has of a unit after a step: the slice that it owns, and its copy of all slices of its column."""

    own_slice: int
    main: tuple[Tensor, Tensor]
    first_slice: int
    copy: tuple[Tensor, Tensor]


def held(rank: Rank) -> dict[str, Held]:
    rank.engine.finish_differences()
    links = rank.engine.links
    first = links.own_slice - links.topology.partition_of(links.data_rank)
    found = {}
    for unit in rank.engine.units:
        assert unit.kept is not None
        main, copy = unit.main_regions(), unit.kept.values
        found[unit.name] = Held(
            links.own_slice, (main.blocks.clone(), main.exact.clone()), first, (copy.blocks.clone(), copy.exact.clone())
        )
    return found


@pytest.mark.parametrize(
    "grid, stage",
    [(Grid.of_nodes(2, 2), 3), (Grid(4, 4, 2), 3), (Grid.of_nodes(2, 1), 1), (Grid.of_nodes(3, 1), 2)],
    ids=str,
)
def test_every_copy_is_the_first_weights_plus_the_coded_difference_of_each_step(grid: Grid, stage: int) -> None:
    given = job(lean(stage), steps=3, make_codec=with_grid_codec)

    def program(backend: VirtualBackend) -> list[dict[str, Held]]:
        rank = Rank(given, backend)
        states = [held(rank)]
        for step in range(given.steps):
            rank.step(step)
            states.append(held(rank))
        rank.engine.close()
        return states

    of_ranks = run_world(grid, program)
    for unit in of_ranks[0][0]:
        for owner in of_ranks:
            blocks = owner[0][unit].main[0].bfloat16()
            for step, state in enumerate(owner):
                main, exact = state[unit].main
                if step > 0:
                    blocks = (blocks.float() + on_grid(main - blocks.float())).bfloat16()
                for other in of_ranks:
                    place = state[unit].own_slice - other[step][unit].first_slice
                    if 0 <= place < grid.ladder.partitions:
                        copy = other[step][unit].copy
                        assert torch.equal(copy[0][place], blocks[0]) and torch.equal(copy[1][place], exact[0].bfloat16())


@pytest.mark.parametrize(
    "grid, policy, steps",
    [
        (Grid.of_nodes(3, 2), lean(3, bits=1), 5),
        (Grid(4, 4, 2), SHARED, 5),
        (Grid.of_nodes(2, 1), lean(1), 5),
        pytest.param(Grid.of_nodes(2, 2), lean(3), 200, marks=pytest.mark.long),
        pytest.param(Grid.of_nodes(2, 2), lean(2, bits=1), 200, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_copies_stay_equal_on_all_nodes_with_delays_skipped_steps_and_evaluations(grid: Grid, policy: Policy, steps: int) -> None:
    def program(backend: VirtualBackend) -> dict[str, Held]:
        rank = Rank(job(policy, steps=steps), backend)
        rank.lanes._pause = random_pauses(backend.rank)
        for step in range(steps):
            loss = rank.loss(step)
            rank.backward(loss * float("inf") if step % 5 == 3 and backend.rank == 1 else loss)
            assert rank.engine.step(LEARNING_RATE).is_skipped == (step % 5 == 3)
            if step % 4 == 1:
                with torch.no_grad():
                    rank.loss(50)
        state = held(rank)
        rank.engine.close()
        return state

    of_ranks = run_world(grid, program)
    for unit, state in of_ranks[0].items():
        column = [other[unit].copy for other in of_ranks if other[unit].first_slice == state.first_slice]
        assert len(column) == grid.ladder.partitions
        assert all(torch.equal(copy[0], state.copy[0]) and torch.equal(copy[1], state.copy[1]) for copy in column)
        assert state.copy[0].isfinite().all() and (state.copy[0].numel() == 0 or state.copy[0].any())


def test_padding_of_a_copy_stays_zero() -> None:
    def program(backend: VirtualBackend) -> bool:
        rank = Rank(job(lean(3)), backend)
        for step in range(3):
            rank.step(step)
        rank.engine.finish_differences()
        links, has_padding = rank.engine.links, False
        for unit in rank.engine.units:
            assert unit.kept is not None
            for padding in unit.layout.paddings(links.own_slice, 1):
                has_padding = True
                assert not unit.kept.own.range(padding.start, padding.stop).any()
        rank.engine.close()
        return has_padding

    assert any(run_world((2, 2), program))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_saves_between_steps_change_no_number_of_bytes_that_a_step_logs(stage: int) -> None:
    """In stages 1 and 2 the bytes are booked at the save. The log of a step has what was booked since the step before."""

    def program(saves: bool, backend: VirtualBackend) -> list[Traffic]:
        rank, logged = Rank(job(lean(stage)), backend), list[Traffic]()
        traffic = StepTraffic(rank.ledger)
        for step in range(3):
            rank.step(step)
            traffic.close_step()
            logged.append(traffic.latest)
            if saves:
                rank.engine.finish_differences()
        rank.engine.close()
        return logged

    with_saves, without = (run_world((2, 1), partial(program, saves)) for saves in (True, False))
    assert with_saves == without and without[0][1].inter_bytes > 0


# ---- the same bits


def test_stages_1_to_3_have_the_same_losses() -> None:
    first, *others = (train_world((2, 1), job(lean(stage), steps=3)) for stage in (1, 2, 3))
    assert all(other == first for other in others)
    assert first != train_world((2, 1), job(POLICIES[3], steps=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_one_node_weights_are_those_of_a_run_without_differences(dtype: torch.dtype) -> None:
    policy = with_weight_differences(with_secondary_weights(POLICIES[3]), E3)
    assert train_world((1, 2), job(policy, dtype=dtype)) == train_world((1, 2), job(with_secondary_weights(POLICIES[3]), dtype=dtype))


def test_recomputation_and_prefetch_change_no_bit() -> None:
    expected = train_world((2, 2), job(SHARED, microbatches=2))
    assert train_world((2, 2), job(SHARED, microbatches=2, prefetch=Prefetch(0, 0))) == expected
    recomputed = ModelShape((17, 40), is_tied=False, is_recomputed=True)
    assert train_world((2, 2), job(SHARED, microbatches=2, shape=recomputed)) == expected


def test_a_skipped_step_sends_no_differences() -> None:
    def program(backend: VirtualBackend) -> list[int]:
        rank, moved = Rank(job(lean(3)), backend), []
        for step in range(4):
            loss = rank.loss(step)
            rank.backward(loss * float("inf") if step == 1 else loss)
            rank.engine.step(LEARNING_RATE)
            moved.append(rank.ledger.inter_node_bytes(rank.ledger.total(Category.WEIGHTS)))
        rank.engine.close()
        return moved

    for first, second, third, fourth in run_world((2, 2), program):
        assert first < second == third < fourth


# ---- rules


@pytest.mark.parametrize("policy", [POLICIES[3], POLICIES[0]], ids=["no kept rung", "no shards"])
def test_differences_need_a_rung_that_is_kept_and_a_sharded_optimizer(policy: Policy) -> None:
    with pytest.raises(ValueError, match="a copy of the weights is kept on the secondary or the full rung"):
        with_weight_differences(policy, E3)


def test_a_kept_copy_crosses_the_intra_link_exactly() -> None:
    with pytest.raises(ValueError, match="crosses the intra link exactly"):
        dataclasses.replace(lean(3), weight_codes=LinkCodes(E3, Code(8)))
    assert lean(3).in_world(Grid.of_nodes(2, 1).ladder).weight_codes == LinkCodes(E3, EXACT)
