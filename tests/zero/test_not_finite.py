"""One NaN or one inf in any gradient, on any rank, in any element, skips the step on every rank, whatever the codecs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from harness.codes import LinkBits
from harness.small_engine import CPU, LEARNING_RATE, Job, ModelShape, Rank, train_world
from harness.worlds import TurnLanes, run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.codecs import LinkCodecs, Regions, SliceShape
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.zero.loss_scaler import DynamicLossScaler
from megatron_zpp.zero.policy import (
    POLICIES,
    Policy,
    Rung,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
)

pytestmark = pytest.mark.virtual

BITS = [LinkBits(inter, intra) for inter, intra in itertools.product((4, 8, 16), repeat=2)]
BAD = [float("nan"), float("inf"), float("-inf")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _id(bits: LinkBits) -> str:
    return f"{bits.inter} between {bits.intra} inside"


# ---- over the ladder: every element that there is


# All of them with two links; each number of bits on each link in every other world.
@pytest.mark.parametrize(
    "world, bits",
    [*(((2, 2), bits) for bits in BITS), *((world, bits) for world in ((3, 2), (1, 3), (3, 1)) for bits in (BITS[1], BITS[5], BITS[6]))],
    ids=str,
)
def test_a_bad_value_in_any_region_block_or_padding_arrives_at_the_owner_of_its_slice_and_nowhere_else(
    world: tuple[int, int], bits: LinkBits
) -> None:
    slice_shape = SliceShape(blocks=64, exact=3)
    world_size = world[0] * world[1]
    boundary, end = slice_shape.blocks * world_size, slice_shape.numel * world_size
    places = [0, 31, 32, boundary // 2, boundary - 32, boundary - 1, boundary, end - 1]  # the last block: padding in most units
    cases = [(place, BAD[index % 3], (5 * index) % world_size) for index, place in enumerate(places)]
    dtype = DTYPES[(bits.inter + world_size) % 3]

    def program(backend: VirtualBackend) -> tuple[int, list[bool]]:
        links = Links(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU)
        codecs = LinkCodecs.of(bits.codes().in_world(backend.grid.ladder), dtype, 32)
        arrived = []
        for place, bad, on_rank in cases:
            flat = torch.randn(end, generator=torch.Generator().manual_seed(backend.rank)).to(dtype)
            flat[boundary - 32 : boundary] = 0.0
            if backend.rank == on_rank:
                flat[place] = bad
            primary = torch.zeros(slice_shape.numel)
            links.lanes.wait(
                links.descend("unit", codecs, Regions.of(flat, slice_shape), Regions.of(primary, slice_shape), accumulate=True)[-1]
            )
            arrived.append(not primary.isfinite().all())
        return links.own_slice, arrived

    for own_slice, arrived in run_world(world, program):
        owners = [place // slice_shape.blocks if place < boundary else (place - boundary) // slice_shape.exact for place, _, _ in cases]
        assert arrived == [owner == own_slice for owner in owners]


# ---- in the engine


@dataclass(frozen=True)
class Spoil:
    """One element of one parameter's gradient on one rank."""

    parameter: str
    element: int
    bad: float
    rank: int
    microbatch: int


def _spoils(parameters: dict[str, int], microbatches: int, first: int) -> list[Spoil]:
    """One per parameter: the first, the last or a middle element, with each bad value, rank and micro-batch in turn."""
    spoils = []
    for index, (name, numel) in enumerate(parameters.items(), start=first):
        element = [0, numel - 1, numel // 2][(index // 2) % 3]
        spoils.append(Spoil(name, element, BAD[index % 3], index % 4, index % microbatches))
    return spoils


def _spoiled(rank: Rank, spoil: Spoil) -> Callable[[], None]:
    """Spoils from now on until the result is called."""

    def hook(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[spoil.element] = spoil.bad
        return spoilt

    handle = dict(rank.model.named_parameters())[spoil.parameter].register_hook(hook)  # type: ignore[no-untyped-call]
    return lambda: handle.remove()


def _check_skips(job: Job, first: int) -> None:
    """Steps with a bad element each, between good ones: they are skipped everywhere and leave no trace."""

    def program(backend: VirtualBackend) -> list[tuple[float, float]]:
        rank = Rank(job, backend)
        parameters = {name: parameter.numel() for name, parameter in rank.model.named_parameters()}
        history = []
        good_steps = iter(range(job.steps))
        for index, spoil in enumerate(_spoils(parameters, job.microbatches, first)):
            if index % 5 == 0:
                loss, result = rank.step(next(good_steps))
                assert not result.is_skipped
                history.append((loss, result.grad_norm))
            _check_one_skip(rank, spoil)
        for step in good_steps:
            loss, result = rank.step(step)
            history.append((loss, result.grad_norm))
        rank.engine.close()
        return history

    assert run_world((2, 2), program) == train_world((2, 2), job)


def _check_one_skip(rank: Rank, spoil: Spoil) -> None:
    state = [unit.main_weight for unit in rank.engine.units] + rank.engine.optimizer.live_tensors()
    before = [tensor.clone() for tensor in state]
    steps = rank.engine.optimizer.steps
    for microbatch in range(rank.job.microbatches):
        loss = rank.loss(50, microbatch)
        is_here = (spoil.rank, spoil.microbatch) == (rank.backend.rank, microbatch)
        remove = _spoiled(rank, spoil) if is_here else lambda: None
        rank.backward(loss, microbatch)
        remove()
    assert rank.engine.step(LEARNING_RATE).is_skipped, spoil
    assert all(torch.equal(now.view(torch.int32), then.view(torch.int32)) for now, then in zip(state, before, strict=True))
    assert rank.engine.optimizer.steps == steps


# Each number of bits on each link, and each dtype with and without recomputation; all others are long.
@pytest.mark.parametrize(
    "bits", [pytest.param(bits, marks=[] if turn in (1, 5, 6) else pytest.mark.long) for turn, bits in enumerate(BITS)], ids=_id
)
def test_one_bad_element_of_any_parameter_skips_the_step_on_every_rank_as_if_it_had_never_been(bits: LinkBits) -> None:
    turn = BITS.index(bits)
    policy = with_quantized_gradients(POLICIES[3], bits.codes())
    shape = ModelShape((17,), is_tied=turn % 2 == 0, is_recomputed=turn % 4 < 2)
    _check_skips(Job(policy, [torch.float32, torch.bfloat16][turn % 2], shape, steps=3, microbatches=1 + (turn % 4 == 0)), first=turn)


ROWS: dict[str, Policy] = {
    "stage 1": with_quantized_gradients(POLICIES[1]),
    "stage 2": with_quantized_gradients(with_quantized_weights(POLICIES[2])),
    "all": with_quantized_gradients(with_secondary_weights(with_quantized_weights(POLICIES[3]))),
    "gradients on the secondary rung": with_quantized_gradients(Policy(Rung.PRIMARY, Rung.SECONDARY, Rung.SECONDARY)),
}


@pytest.mark.parametrize("row", list(ROWS))
def test_one_bad_element_skips_the_step_in_every_row(row: str) -> None:
    turn = list(ROWS).index(row)
    _check_skips(Job(ROWS[row], torch.bfloat16, ModelShape((17,)), steps=3, microbatches=1 + turn % 2), first=turn)


@pytest.mark.parametrize("bits", [LinkBits(4, 8), LinkBits(8, 16)], ids=_id)
def test_a_gradient_too_large_for_fp16_skips_the_step_and_lowers_the_loss_scale(bits: LinkBits) -> None:
    policy = with_quantized_gradients(POLICIES[3], bits.codes())
    job = Job(policy, torch.float16, ModelShape((5,)), steps=1, loss_scaler=lambda: DynamicLossScaler(scale=2.0**20, hysteresis=1))

    def program(backend: VirtualBackend) -> tuple[int, float, bool]:
        rank = Rank(job, backend)
        skipped = 0
        while rank.step(skipped)[1].is_skipped:
            skipped += 1
        scale = rank.engine.loss_scaler.scale
        rank.engine.close()
        return skipped, scale, all(bool(unit.main_weight.isfinite().all()) for unit in rank.engine.units)

    results = run_world((2, 2), program)
    assert len(set(results)) == 1
    skipped, scale, is_finite = results[0]
    assert skipped > 0 and scale == 2.0 ** (20 - skipped) and is_finite
