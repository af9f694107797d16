"""Gradients of what tensor ranks share: equal on all holders, once per step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from harness.divided_model import CHANNELS, SHAPE, DividedRank, Stated, bits_of, whole_state
from harness.small_engine import LEARNING_RATE, Job
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import LinkCodes
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.norms import count_zeros
from megatron_zpp.zero.pieces import pieces_of
from megatron_zpp.zero.policy import POLICIES, ZEROPP, Policy, with_gradients_summed_on_secondary
from megatron_zpp.zero.shared_gradients import shared_places, sharing_received_bytes

pytestmark = pytest.mark.virtual

GRID = Grid.of_nodes(2, 4, tensor_ranks=2)
ROWS = {
    "stage 0": POLICIES[0],
    "stage 1": POLICIES[1],
    "stage 2": POLICIES[2],
    "stage 3": POLICIES[3],
    "ZeRO++": ZEROPP,
    "ZeRO++, summed on secondary": with_gradients_summed_on_secondary(ZEROPP),
}
# Every row, the coded ones on two links, and each other grid with one row.
CASES = [
    *((GRID if "ZeRO" in row else Grid.of_nodes(2, 2, tensor_ranks=2), 2, row) for row in ROWS),
    (Grid.of_nodes(1, 2, tensor_ranks=2), 2, "stage 3"),
    (Grid.of_nodes(1, 4, tensor_ranks=2), 1, "stage 0"),
    (Grid.of_nodes(2, 4, tensor_ranks=4), 2, "stage 1"),
    (Grid.of_nodes(2, 3, tensor_ranks=3), 1, "stage 2"),
]
Elements = dict[str, Tensor]  # by parameter the elements of the whole one, in a row; NaN where a rank has none


def gradients(rank: DividedRank) -> Elements:
    """What the rank's optimizer would read now."""
    found = {name: torch.full((math.prod(shape),), math.nan) for name, shape in rank.shapes().items()}
    for unit, gradient in zip(rank.engine.units, rank.engine.gradients, strict=True):
        for segment in unit.layout.segments(unit.first_slice, unit.slices):
            values = gradient.for_optimizer.range(segment.offset, segment.offset + segment.stop - segment.start)
            for piece in pieces_of(segment.spec.name, "gradient", segment.spec.division, segment.start, values):
                matrix = found[piece.parameter].view(-1, math.prod(segment.spec.whole_shape[1:]))
                columns = matrix[:, slice(*(piece.columns or (None, None)))]
                flat = columns.flatten()
                flat[piece.start : piece.stop] = piece.values
                columns.copy_(flat.view_as(columns))
    return found


def add_noise(rank: DividedRank) -> None:
    """Other noise on every rank, and in the padding none."""
    generator = torch.Generator().manual_seed(rank.backend.rank)
    for unit, gradient in zip(rank.engine.units, rank.engine.gradients, strict=True):
        for segment in unit.layout.segments(unit.first_slice, unit.slices):
            values = gradient.for_optimizer.range(segment.offset, segment.offset + segment.stop - segment.start)
            values += torch.randn(values.numel(), generator=generator)


def expected(name: str, of_holders: list[Tensor]) -> list[Tensor]:
    """of_holders: the elements of each tensor rank before. The elements of each afterwards."""
    held = [values.isfinite() for values in of_holders]
    is_partial = name.split(".")[-2] == "key" or name.endswith("gain")
    total = torch.full_like(of_holders[0], math.nan)
    for values, is_held in zip(of_holders, held, strict=True):
        is_first = is_held & total.isnan()
        later = torch.where(is_held & is_partial, total + values, total)
        total = torch.where(is_first, values, later)
    return [torch.where(is_held, total, math.nan) for is_held in held]


@pytest.mark.parametrize("grid, groups, row", CASES, ids=str)
def test_parts_are_added_in_the_order_of_the_ranks_and_whole_gradients_are_those_of_the_first(grid: Grid, groups: int, row: str) -> None:
    def program(backend: VirtualBackend) -> tuple[Elements, Elements]:
        rank = DividedRank(Job(ROWS[row], shape=SHAPE, steps=1), backend, groups=groups)
        rank.accumulate(0)
        rank.engine._pass.finish_descents()
        add_noise(rank)
        before = gradients(rank)
        rank.engine.finish_gradients()
        return before, gradients(rank)

    results = run_world(grid, program)
    for data_rank in range(grid.data_ranks):
        of_link = [results[grid.rank_of(data_rank, links)] for links in range(grid.tensor_ranks)]
        for name in of_link[0][0]:
            wanted = expected(name, [before[name] for before, _ in of_link])
            for (_, after), values in zip(of_link, wanted, strict=True):
                assert torch.equal(bits_of(after[name].nan_to_num(nan=7.0)), bits_of(values.nan_to_num(nan=7.0))), name


@pytest.mark.parametrize("row", ["stage 0", "stage 3"])
def test_gradients_that_are_finished_twice_are_added_up_and_cross_the_link_once(row: str) -> None:
    def program(backend: VirtualBackend) -> None:
        rank = DividedRank(Job(ROWS[row], shape=SHAPE, microbatches=2), backend, groups=1)
        engine = rank.engine
        layouts = [unit.layout for unit in engine.units]
        places = shared_places(layouts, engine.units[0].first_slice, engine.units[0].slices, 2)
        once = sharing_received_bytes(sum(place.numel for of_all in places.values() for place in of_all), 2)
        for step in range(2):
            rank.accumulate(step)
            engine.finish_gradients()
            first = gradients(rank)
            engine.finish_gradients()
            assert all(torch.equal(bits_of(values), bits_of(first[name])) for name, values in gradients(rank).items())
            with pytest.raises(RuntimeError, match="the last micro-batch of this step has come already"):
                rank.backward(rank.loss(0), 1)
            engine.step(LEARNING_RATE)
            assert rank.ledger.total(Category.REPLICAS) == Traffic(tensor_bytes=(step + 1) * once)
        engine.finish_gradients()  # none have come since the last update
        assert rank.ledger.total(Category.REPLICAS) == Traffic(tensor_bytes=2 * once)
        engine.close()

    run_world(GRID, program)


def test_one_tensor_rank_exchanges_no_gradients_of_shared_elements() -> None:
    def program(backend: VirtualBackend) -> Traffic:
        rank = DividedRank(Job(shape=SHAPE), backend)
        rank.train()
        return rank.ledger.total(Category.REPLICAS)

    assert set(run_world((1, 2), program)) == {Traffic()}


NOISY: dict[str, tuple[Policy, torch.dtype]] = {
    "stage 0": (POLICIES[0], torch.float32),
    "stage 2": (POLICIES[2], torch.bfloat16),
    "stage 3": (POLICIES[3], torch.bfloat16),
    "ZeRO++": (ZEROPP, torch.bfloat16),
}


@pytest.mark.parametrize("row", NOISY)
def test_shared_elements_stay_equal_to_the_bit_while_the_gradients_of_one_holder_are_noisy(row: str) -> None:
    policy, dtype = NOISY[row]
    steps = 12 if row == "stage 3" else 3

    def program(backend: VirtualBackend) -> Stated:
        rank = DividedRank(Job(policy, dtype, SHAPE, steps), backend)
        if rank.backend.rank == 2:
            generator = torch.Generator().manual_seed(0)
            for parameter in rank.model.parameters():
                parameter.register_hook(lambda grad: grad + 0.01 * torch.randn(grad.shape, generator=generator).to(grad.dtype))
        rank.train()
        return rank.stated()

    ranks = run_world(Grid.of_nodes(1, 4, tensor_ranks=4), program)  # two ranks have the key of one group
    state = whole_state((pieces for pieces, _ in ranks), ranks[0][1])
    assert all(bool(values.any()) for (name, _), values in state.items() if "unused" not in name)


def test_a_bad_part_on_any_rank_skips_the_step_on_all_and_a_bad_whole_one_only_on_the_first_holder() -> None:
    grid = Grid.of_nodes(1, 4, tensor_ranks=4)

    def program(backend: VirtualBackend) -> None:
        rank = DividedRank(Job(ZEROPP, torch.bfloat16, SHAPE), backend)
        parameters = {name: parameter for name, parameter in rank.model.named_parameters() if not name.endswith("unused")}
        state = [unit.main_weight for unit in rank.engine.units] + rank.engine.optimizer.live_tensors()
        for turn, (name, parameter) in enumerate(parameters.items()):
            bad_rank, before = (turn + 1) % 4, [values.clone() for values in state]
            is_whole = "norm" in name or "embedding" in name or name.endswith("down.bias")
            loss = rank.loss(turn)
            if backend.rank == bad_rank:
                handle = parameter.register_hook(lambda grad: torch.full_like(grad, [math.nan, math.inf][turn % 2]))  # noqa: B023
            rank.backward(loss)
            if backend.rank == bad_rank:
                handle.remove()
            assert rank.engine.step(LEARNING_RATE).is_skipped == (not is_whole or bad_rank == 0), name
            if not is_whole or bad_rank == 0:
                assert all(torch.equal(bits_of(now), bits_of(then)) for now, then in zip(state, before, strict=True))
            else:
                assert all(bool(now.isfinite().all()) for now in state)
        rank.engine.close()

    run_world(grid, program)


@pytest.mark.parametrize(
    "grid, groups, row",
    [
        (Grid.of_nodes(2, 2, 2), 1, "stage 0"),
        (GRID, 2, "stage 3"),
        (Grid.of_nodes(2, 4, tensor_ranks=4), 2, "stage 2"),
        (Grid.of_nodes(2, 3, 3), 1, "stage 1"),
    ],
    ids=str,
)
def test_norms_zeros_and_clipping_count_each_element_once(grid: Grid, groups: int, row: str) -> None:
    """As one tensor rank does; sums over ranks are taken in another order. One parameter of each kind has zeros for a gradient."""
    zeroed = ("up.weight", "key.weight", "down.bias")

    def program(backend: VirtualBackend) -> tuple[float, float, int]:
        rank = DividedRank(Job(ROWS[row], shape=SHAPE, clip_grad=0.1), backend, groups=groups)
        for name, parameter in rank.model.named_parameters():
            if name.endswith(zeroed):
                parameter.register_hook(torch.zeros_like)
        rank.accumulate(0)
        rank.engine.finish_gradients()
        zeros, weights = int(count_zeros(rank.engine.gradients, rank.engine.links)), rank.engine.weight_norm()
        norm = rank.engine.update(LEARNING_RATE).grad_norm
        rank.engine.close()
        return norm, weights, zeros

    alone = run_world(replace(grid, world_size=grid.data_ranks, ranks_per_node=grid.ladder.ranks_per_node, tensor_ranks=1), program)
    for norm, weights, zeros in run_world(grid, program):
        assert (
            zeros == alone[0][2] == SHAPE.hidden * (sum(SHAPE.inner) + 2 * groups * CHANNELS + 2 * 2)
        )  # the last are down.bias and unused
        assert weights == pytest.approx(alone[0][1], rel=1e-12)
        assert norm == pytest.approx(alone[0][0], rel=2e-5)
        assert norm > 0.1


def test_codes_that_differ_between_ladders_leave_what_they_share_equal() -> None:
    """Four bits of a slice's blocks, whose neighbours are other elements on every ladder."""

    def program(backend: VirtualBackend) -> tuple[Elements, Elements]:
        rank = DividedRank(Job(replace(ZEROPP, weight_codes=LinkCodes()), shape=SHAPE), backend, groups=1)
        rank.accumulate(0)
        rank.engine._pass.finish_descents()
        before = gradients(rank)
        rank.engine.finish_gradients()
        return before, gradients(rank)

    first, second = run_world(GRID, program)[:2]
    name = "blocks.1.key.weight"
    assert not torch.equal(first[0][name], second[0][name])
    assert torch.equal(bits_of(first[1][name]), bits_of(second[1][name]))
