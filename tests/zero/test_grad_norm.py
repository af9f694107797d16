"""Counts and norms over shards, against plain torch's over whole tensors."""

from __future__ import annotations

import math
from functools import cache

import pytest
from harness.small_engine import ROWS, Job, ModelShape, Rank, global_batch, plain_model
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.zero.norms import count_zeros

pytestmark = pytest.mark.virtual

SHAPE = ModelShape(is_tied=False, has_spare=True)  # the spare parameters go unused, so their gradients are zeros
WORLDS = [(1, 1), (1, 3), (1, 4), (2, 2)]


@cache
def sharded(world: tuple[int, int], row: str) -> list[tuple[int, float]]:
    """Of each rank: zeros of the mean gradient of the first step, and the norm of the first weights."""

    def program(backend: VirtualBackend) -> tuple[int, float]:
        rank = Rank(Job(ROWS[row], shape=SHAPE), backend)
        rank.accumulate(0)
        rank.engine.finish_gradients()
        return count_zeros(rank.engine.gradients, rank.engine.links), rank.engine.weight_norm()

    return run_world(world, program)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("world", WORLDS)
def test_zeros_of_the_gradient_are_counted_once_each_and_padding_never(world: tuple[int, int], row: str) -> None:
    model = plain_model(SHAPE)
    model(*global_batch(0)).backward()
    zeros = sum(parameter.numel() if parameter.grad is None else int((parameter.grad == 0).sum()) for parameter in model.parameters())
    assert zeros >= 2 * 3 * SHAPE.hidden
    assert [count for count, _ in sharded(world, row)] == [zeros] * (world[0] * world[1])


@pytest.mark.parametrize("world", WORLDS)
def test_the_norm_of_the_weights_is_that_of_the_whole_model_with_the_same_bits_wherever_they_rest(world: tuple[int, int]) -> None:
    whole = math.sqrt(sum(parameter.double().square().sum().item() for parameter in plain_model(SHAPE).parameters()))
    norms = {norm for row in ROWS for _, norm in sharded(world, row)}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(whole, rel=1e-12)  # some thousand fp64 additions in another order: 4e3 x 2^-53


FP64_BYTES, NUMBERS = 8, 3  # the sum of squares, the order of hops, whether parameters were left out


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("has_spare", [False, True], ids=["all parameters are reached", "every rank leaves some out"])
def test_the_ranks_tell_each_other_three_numbers_in_a_step_and_a_byte_per_parameter_only_if_all_leave_some_out(
    blocks: int, has_spare: bool
) -> None:
    shape = ModelShape(inner=(5,) * blocks, has_spare=has_spare)

    def program(backend: VirtualBackend) -> Traffic:
        rank = Rank(Job(ROWS["stage 3"], shape=shape), backend)
        rank.step(0)
        return rank.ledger.total(Category.CONTROL)

    of_rank = NUMBERS * FP64_BYTES + has_spare * len(list(plain_model(shape).parameters()))
    assert run_world((2, 2), program) == [Traffic(inter_bytes=2 * of_rank, intra_bytes=of_rank)] * 4
