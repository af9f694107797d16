"""Counts and norms over shards, against plain torch's over whole tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
from harness.small_engine import ROWS, Job, ModelShape, Rank, global_batch, plain_model
from harness.worlds import run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.zero.norms import count_zeros
from megatron_zpp.zero.step_calls import StepCalls

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


FP64_BYTES, NUMBERS = 8, 3  # the sum of squares, and checksums of the order of hops and of parameters that were left out


class OneSpareEach(Rank):
    """Rank r reaches the spare parameter of block r mod 2 alone."""

    def loss(self, step: int, microbatch: int = 0) -> Tensor:
        block = self.model.blocks[self.backend.rank % 2]
        block.forward = lambda hidden, _: type(block).forward(block, hidden, True)
        return super().loss(step, microbatch)


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize(
    ("has_spare", "kind", "unused"),
    [(False, Rank, []), (True, Rank, range(4)), (True, OneSpareEach, range(2, 4))],
    ids=["all are reached", "the same are left out", "others are left out on each rank"],
)
def test_the_ranks_tell_each_other_three_numbers_in_a_step_and_which_parameters_they_left_out_only_if_these_differ(
    blocks: int, has_spare: bool, kind: type[Rank], unused: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, take, taken = ModelShape(inner=(5,) * blocks, has_spare=has_spare), StepCalls.take_unused, list[frozenset[str]]()
    monkeypatch.setattr(StepCalls, "take_unused", lambda calls, numbers: taken.append(found := take(calls, numbers)) or found)

    def program(backend: VirtualBackend) -> Traffic:
        rank = kind(Job(ROWS["stage 3"], shape=shape), backend)
        rank.step(0)
        return rank.ledger.total(Category.CONTROL)

    of_rank = NUMBERS * FP64_BYTES + (kind is OneSpareEach) * len(list(plain_model(shape).parameters()))
    assert run_world((2, 2), program) == [Traffic(inter_bytes=of_rank, intra_bytes=3 * of_rank)] * 4
    assert taken == [frozenset(f"blocks.{block}.spare" for block in unused if block < blocks)] * 4
