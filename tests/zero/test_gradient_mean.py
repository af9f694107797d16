"""Gradients that descend as integers are the mean over all ranks, in every world, for every shape and dtype."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from harness.block_numbers import ROUNDOFF, roundoff, worst_error
from harness.codes import CodeOptions, LinkBits, bits_of
from harness.small_engine import CPU, LEARNING_RATE, Job, ModelShape, Rank, plain_model
from harness.worlds import TurnLanes, run_world
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.code import EXACT
from megatron_zpp.comm.codecs import LinkCodecs, Regions, make_codec
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import ParamSpec
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.policy import POLICIES, Policy, Rung, with_quantized_gradients

pytestmark = pytest.mark.virtual

WORLDS = list(itertools.product(range(1, 5), range(1, 5)))  # N, G
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WORLDS_AND_DTYPES = [(world, DTYPES[index % 3]) for index, world in enumerate(WORLDS)]
BLOCK = 64
INT4, PLAIN = LinkBits(4, 4), CodeOptions()
SHAPES = {"prime": (1009, 7), "uneven": (34, 33), "row": (1, 129), "single": (1, 1), "bias": (13,), "single bias": (1,)}


@dataclass(frozen=True)
class Case:
    """How gradients of some parameters descend in one world."""

    nodes: int
    ranks: int
    shapes: tuple[tuple[int, ...], ...] = tuple(SHAPES.values())
    dtype: torch.dtype = torch.float32
    bits: LinkBits = INT4
    block_numel: int = BLOCK
    options: CodeOptions = PLAIN

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks

    def layout(self) -> FlatLayout:
        params = [ParamSpec(str(index), Division.undivided(shape), _no_values, True) for index, shape in enumerate(self.shapes)]
        return FlatLayout(params, self.world_size, self.block_numel)

    def codecs(self, topology: Topology) -> LinkCodecs:
        return LinkCodecs.of(self.bits.codes(self.options).in_world(topology), self.dtype, self.block_numel)


def _no_values(start: int, stop: int) -> Tensor:
    raise RuntimeError("these parameters have gradients only")


def _gradients(case: Case, seed: int = 0) -> list[Tensor]:
    """The flat gradient of every rank in the case's dtype: common to all ranks in part, noise in part, zero in the padding."""
    layout = case.layout()
    common = _noise(layout, seed)
    return [(common + _noise(layout, 100 * seed + rank + 1)).to(case.dtype) for rank in range(case.world_size)]


def _noise(layout: FlatLayout, seed: int) -> Tensor:
    flat = torch.zeros(layout.numel)
    generator = torch.Generator().manual_seed(seed)
    for param in layout.params:
        flat[param.offset : param.offset + param.numel] = torch.randn(param.numel, generator=generator)
    return flat


def _descended(case: Case, microbatches: Sequence[list[Tensor]], codecs: LinkCodecs | None = None) -> Tensor:
    """fp32 [numel]: the primary slices of all ranks after every micro-batch has been added, in the order of the flat unit.

    Stochastic rounding draws other numbers for every rank and micro-batch.
    """
    layout = case.layout()
    slice_shape = layout.slice_shape

    def program(backend: VirtualBackend) -> tuple[int, Tensor]:
        links = Links(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU)
        primary = torch.zeros(slice_shape.numel)
        for index, gradients in enumerate(microbatches):
            full = Regions.of(gradients[backend.rank].clone(), slice_shape)
            drawn = (codecs or case.codecs(backend.grid.ladder)).with_noise_for(backend.rank, index)
            hops = links.descend("unit", drawn, full, Regions.of(primary, slice_shape), accumulate=True)
            links.lanes.wait(hops[-1])
        return links.own_slice, primary

    whole = torch.full((layout.numel,), float("nan"))
    blocks, exact = whole[: layout.blocks_numel].view(layout.slices, -1), whole[layout.blocks_numel :].view(layout.slices, -1)
    for own_slice, primary in run_world((case.nodes, case.ranks), program):
        blocks[own_slice], exact[own_slice] = primary[: slice_shape.blocks], primary[slice_shape.blocks :]
    return whole


def _true_mean(gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.double() for gradient in gradients]).mean(0)


def _bound(case: Case, gradients: list[Tensor]) -> Tensor:
    """fp64, by element of the flat unit: the largest possible error.

    Of each hop it is the error of what crosses, half a step of its block's largest value, averaged like the values. The second hop sends
    the mean of what has arrived, which is within the error of the first hop of the node's true mean. Sums, quotients and casts of the
    exact values add a few fp32 roundings of values that are no larger than the mean of magnitudes.
    """
    within = [_hop_error(case, gradient.double(), case.bits.intra, case.ranks) for gradient in gradients]
    error = torch.zeros(len(gradients[0]), dtype=torch.float64)
    for node in range(case.nodes):
        of_node = slice(node * case.ranks, (node + 1) * case.ranks)
        arrived = torch.stack(within[of_node]).mean(0)
        sent = _true_mean(gradients[of_node]).abs() + arrived
        error += (arrived + _hop_error(case, sent, case.bits.inter, case.nodes)) / case.nodes
    magnitude = torch.stack([gradient.double().abs() for gradient in gradients]).mean(0) + error
    return error + (case.world_size + 4) * ROUNDOFF * magnitude


def _hop_error(case: Case, values: Tensor, bits: int, members: int) -> Tensor:
    if members == 1:
        return torch.zeros_like(values)
    blocks_numel = case.layout().blocks_numel
    error = roundoff(case.dtype) * values.abs() + (2.0**-25 if case.dtype == torch.float16 else 0.0)
    if bits < 16:
        error[:blocks_numel] = worst_error(values[:blocks_numel], bits, case.block_numel)
    return error


def _of_params(case: Case, flat: Tensor) -> list[Tensor]:
    by_spec = {param.spec.name: flat[param.offset : param.offset + param.numel] for param in case.layout().params}
    return [by_spec[str(index)] for index in range(len(case.shapes))]


def _slope(result: Tensor, true_mean: Tensor) -> float:
    return float((result.double() * true_mean).sum() / true_mean.square().sum())


def _check_slopes(case: Case, result: Tensor, true_mean: Tensor, bound: Tensor) -> None:
    """The regression slope of the result on the true mean is 1: slope - 1 = sum(e t) / sum(t t), where no error e exceeds its bound.

    A mean over too few or too many ranks would have a slope of 1/2 or less, or of 2 or more.
    """
    for got, expected, limit in zip(*(_of_params(case, flat) for flat in (result, true_mean, bound)), strict=True):
        largest = float((limit * expected.abs()).sum() / expected.square().sum())
        assert abs(_slope(got, expected) - 1) <= largest
        assert expected.numel() < 100 or largest < 0.5


# ---- one unit over the ladder


@pytest.mark.parametrize("world, dtype", WORLDS_AND_DTYPES, ids=str)
def test_every_element_is_the_true_mean_within_half_a_step_of_each_hop_and_the_slope_is_1(
    world: tuple[int, int], dtype: torch.dtype
) -> None:
    case = Case(*world, dtype=dtype)
    gradients = _gradients(case)
    result, bound = _descended(case, [gradients]), _bound(case, gradients)
    assert ((result.double() - _true_mean(gradients)).abs() <= bound).all()
    _check_slopes(case, result, _true_mean(gradients), bound)


@pytest.mark.parametrize("world, hidden", [(world, 2 + (sum(world) < 5)) for world in WORLDS], ids=str)
def test_an_embedding_of_50257_tokens_has_slope_1_within_a_hundredth(world: tuple[int, int], hidden: int) -> None:
    """Over so many elements errors average out but for what rounding to nearest leaves of correlation; a lost code at the positive
    end of the range would cost 1.5 %."""
    if world[0] * world[1] > 9:
        hidden = 1
    case = Case(*world, shapes=((50257, hidden),), dtype=DTYPES[(2 * world[0] + world[1] + hidden) % 3], block_numel=256)
    gradients = _gradients(case)
    result, true_mean, bound = _descended(case, [gradients]), _true_mean(gradients), _bound(case, gradients)
    assert ((result.double() - true_mean).abs() <= bound).all()
    _check_slopes(case, result, true_mean, bound)
    assert abs(_slope(result, true_mean) - 1) < 0.01


@pytest.mark.parametrize("world, dtype", WORLDS_AND_DTYPES, ids=str)
def test_a_parameter_of_one_element_is_the_mean_but_for_roundings(world: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(*world, shapes=((1, 1), (1, 1, 1), (40, 3)), dtype=dtype)
    gradients = [gradient.abs() + (gradient != 0) for gradient in _gradients(case)]
    result = _descended(case, [gradients])
    parts = zip(_of_params(case, result.double()), _of_params(case, _true_mean(gradients)), strict=True)
    for (got, expected), shape in zip(parts, case.shapes, strict=True):
        if math.prod(shape) == 1:  # it is the largest of its block: scale and product round on either hop, sums and quotients too
            assert float(got) == pytest.approx(float(expected), rel=(case.world_size + 6) * ROUNDOFF)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_blocks_filled_with_their_index_come_back_in_order_within_one_ulp(world: tuple[int, int], bits: int) -> None:
    blocks = 47 * world[0] * world[1]
    case = Case(*world, shapes=((blocks, 32),), bits=LinkBits(bits, bits), block_numel=32)
    filled = torch.arange(1, blocks + 1, dtype=torch.float32).repeat_interleave(32)
    result = _descended(case, [[filled.clone() for _ in range(case.world_size)]])
    assert ((result - filled).abs().numpy() <= np.spacing(filled.numpy())).all()


@pytest.mark.parametrize("world, dtype", WORLDS_AND_DTYPES, ids=str)
def test_one_dimensional_parameters_have_the_bits_of_a_descent_without_quantization(world: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(*world, dtype=dtype)
    gradients = _gradients(case)
    exact = make_codec(EXACT, dtype, BLOCK)
    start = case.layout().blocks_numel
    assert torch.equal(_descended(case, [gradients])[start:], _descended(case, [gradients], LinkCodecs(exact, exact))[start:])


@pytest.mark.parametrize("world", [(1, 3), (3, 1), (2, 2), (3, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_over_micro_batches_is_within_the_sum_of_their_bounds(world: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(*world, dtype=dtype)
    microbatches = [_gradients(case, seed) for seed in range(1, 6)]
    result = _descended(case, microbatches).double()
    expected = torch.stack([_true_mean(gradients) for gradients in microbatches]).sum(0)
    limit = torch.stack([_bound(case, gradients) for gradients in microbatches]).sum(0)
    rounding = 5 * ROUNDOFF * 5 * torch.stack([_true_mean(gradients).abs() for gradients in microbatches]).amax(0)
    assert ((result - expected).abs() <= limit * (1 + 5 * ROUNDOFF) + rounding).all()


@pytest.mark.parametrize("world", [(2, 2), (3, 4)], ids=str)
def test_every_pair_of_bits_gives_the_mean_within_its_bound(world: tuple[int, int]) -> None:
    for inter, intra in itertools.product([4, 8, 16], repeat=2):
        case = Case(*world, dtype=torch.bfloat16, bits=LinkBits(inter, intra))
        gradients = _gradients(case)
        assert ((_descended(case, [gradients]).double() - _true_mean(gradients)).abs() <= _bound(case, gradients)).all()


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_gradients_of_any_size_descend_with_the_same_relative_error(size: float) -> None:
    case = Case(2, 3)
    gradients = [gradient * size for gradient in _gradients(case)]
    assert ((_descended(case, [gradients]).double() - _true_mean(gradients)).abs() <= _bound(case, gradients)).all()


# ---- rotated and stochastic codes

OPTIONS = [CodeOptions(True, False), CodeOptions(False, True), CodeOptions(True, True)]


def _hadamard() -> Tensor:
    """fp64 [32, 32]: the Hadamard matrix in the order of its Kronecker products; its inverse is itself / 32."""
    return functools.reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)] * 5)


def _rotated(case: Case, flat: Tensor) -> Tensor:
    """fp64: the flat unit with every 32 neighbours of its blocks region transformed."""
    blocks_numel = case.layout().blocks_numel
    blocks = flat[:blocks_numel].double().view(-1, 32) @ _hadamard()
    return torch.cat([blocks.view(-1), flat[blocks_numel:].double()])


def _bound_with_options(case: Case, gradients: list[Tensor]) -> Tensor:
    """As _bound, where errors of a stochastic code reach a whole step, and those of rotated codes are added up over 32 values and divided.

    Five sums of two, before and after, round values that are no larger than the 32 magnitudes together.
    """
    steps = 2.0 if case.options.is_stochastic else 1.0
    if not case.options.is_rotated:
        return steps * _bound(case, gradients)
    fp32 = dataclasses.replace(case, dtype=torch.float32)
    bound = steps * _bound(fp32, [_rotated(case, gradient) for gradient in gradients])
    blocks_numel = case.layout().blocks_numel
    magnitudes = torch.stack([gradient.double().abs() for gradient in gradients]).amax(0)[:blocks_numel].view(-1, 32).sum(1, keepdim=True)
    bound[:blocks_numel] = (bound[:blocks_numel].view(-1, 32).mean(1, keepdim=True) + 10 * ROUNDOFF * magnitudes).repeat(1, 32).view(-1)
    bound[blocks_numel:] = _bound(case, gradients)[blocks_numel:]
    return bound


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("world", [(1, 3), (3, 1), (2, 2), (3, 2), (2, 4)], ids=str)
def test_rotated_and_stochastic_codes_give_the_mean_within_their_bounds(world: tuple[int, int], options: CodeOptions) -> None:
    for bits, dtype in zip([LinkBits(4, 4), LinkBits(4, 8), LinkBits(4, 16), LinkBits(16, 4)], itertools.cycle(DTYPES)):
        case = Case(*world, dtype=dtype, bits=bits, options=options)
        gradients = _gradients(case)
        error = (_descended(case, [gradients]).double() - _true_mean(gradients)).abs()
        assert (error <= _bound_with_options(case, gradients)).all()


@pytest.mark.parametrize("is_rotated", [False, True])
def test_stochastic_codes_lean_to_no_side_over_two_hops(is_rotated: bool) -> None:
    """The slope is 1 within 4 standard errors: slope - 1 = sum(e t) / sum(t t), with errors e independent of the true mean t."""
    case = Case(2, 2, shapes=((50257, 4),), block_numel=256, options=CodeOptions(is_rotated, True))
    gradients = _gradients(case)
    result, true_mean = _descended(case, [gradients]), _true_mean(gradients)
    errors = result.double() - true_mean
    standard_error = math.sqrt(float((errors * true_mean).square().sum())) / float(true_mean.square().sum())
    assert abs(_slope(result, true_mean) - 1) <= 4 * standard_error < 0.003


def test_rotation_halves_the_mean_squared_error_where_one_gradient_of_a_block_stands_out() -> None:
    """One of 50 among ones: unrotated codes are 50 / 7 apart, so the others become 0; rotated, it is 32 times about 50 / sqrt(32)."""
    case = Case(2, 2, shapes=((512, 256),), block_numel=256)
    gradients = _gradients(case)
    for gradient in gradients:
        gradient[::256] = 50.0
    plain, rotated = (
        (_descended(dataclasses.replace(case, options=CodeOptions(is_rotated)), [gradients]).double() - _true_mean(gradients))
        .square()
        .mean()
        for is_rotated in (False, True)
    )
    assert rotated < 0.5 * plain


# ---- the engine


ROWS: dict[str, Policy] = {
    **{f"stage {stage}": with_quantized_gradients(POLICIES[stage]) for stage in (1, 2, 3)},
    "gradients on the secondary rung": with_quantized_gradients(Policy(Rung.PRIMARY, Rung.SECONDARY, Rung.SECONDARY)),
    "8 bits inside, 4 between": with_quantized_gradients(POLICIES[3], LinkBits(4, 8).codes()),
}


@dataclass(frozen=True)
class FirstStep:
    """Of all ranks' primary slices in slice order, by unit: the mean gradient, and what the optimizer got (clipped) of it."""

    mean: list[Tensor]
    clipped: list[Tensor]
    grad_norm: float


def _first_step(world: tuple[int, int], job: Job) -> FirstStep:
    def program(backend: VirtualBackend) -> tuple[int, list[Tensor], list[Tensor], float]:
        rank = Rank(job, backend)
        rank.accumulate(0)
        rank.engine.finish_gradients()
        means = [torch.cat([part.flatten() for part in gradient.primary.parts()]) for gradient in rank.engine.gradients]
        grad_norm = rank.engine.step(LEARNING_RATE).grad_norm
        clipped = [moments["exp_avg"] / (1 - 0.9) for moments in rank.engine.optimizer.moments]  # after one step with beta1 = 0.9
        rank.engine.close()
        return rank.engine.links.own_slice, means, clipped, grad_norm

    results = sorted(run_world(world, program), key=lambda result: result[0])
    return FirstStep(
        *([torch.stack(parts) for parts in zip(*each, strict=True)] for each in list(zip(*results, strict=True))[1:3]), results[0][3]
    )


def _error_bounds(world: tuple[int, int], job: Job) -> list[Tensor]:
    """By unit, in the form of FirstStep.mean: how far a quantized mean may be from the exact one."""
    units = Rank(dataclasses.replace(job, policy=POLICIES[3]), _alone()).model.unit_specs()
    by_microbatch = [
        [_local_gradients(world, job, rank, microbatch) for rank in range(world[0] * world[1])] for microbatch in range(job.microbatches)
    ]
    bounds = []
    for unit in units:
        case = Case(*world, tuple(spec.shape for spec in unit.params), torch.float32, bits_of(job.policy.gradient_codes), job.block_numel)
        layout = FlatLayout(unit.params, case.world_size, job.block_numel)
        total = torch.zeros(layout.numel, dtype=torch.float64)
        for by_rank in _whole_descents(job, by_microbatch):
            flats = [_flat(layout, gradients) for gradients in by_rank]
            total += _bound(case, flats)
        blocks = total[: layout.blocks_numel].view(layout.slices, -1)
        bounds.append(torch.cat([blocks, total[layout.blocks_numel :].view(layout.slices, -1)], 1))
    return bounds


def _whole_descents(job: Job, by_microbatch: list[list[dict[str, Tensor]]]) -> list[list[dict[str, Tensor]]]:
    """Gradients as they start to descend: a sum over micro-batches where they rest full between them."""
    if job.policy.gradients is not Rung.FULL:
        return by_microbatch
    return [[{name: sum(each[name] for each in of_rank) for name in of_rank[0]} for of_rank in zip(*by_microbatch, strict=True)]]  # type: ignore[misc]


def _local_gradients(world: tuple[int, int], job: Job, rank: int, microbatch: int) -> dict[str, Tensor]:
    model = plain_model(job.shape)
    tokens, labels = Rank.batch(_Place(job, Grid.of_nodes(*world), rank), 0, microbatch)  # type: ignore[arg-type]
    (model(tokens, labels) / job.microbatches).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


class _Place:
    """As much of a Rank as its batch depends on."""

    def __init__(self, job: Job, grid: Grid, rank: int) -> None:
        self.job = job
        self.backend = dataclasses.make_dataclass("Backend", ["grid", "rank"])(grid, rank)


def _alone() -> VirtualBackend:
    return run_world((1, 1), lambda backend: backend)[0]


def _flat(layout: FlatLayout, gradients: dict[str, Tensor]) -> Tensor:
    flat = torch.zeros(layout.numel)
    for param in layout.params:
        flat[param.offset : param.offset + param.numel] = gradients[param.spec.name].flatten()
    return flat


# Each row with two links and with one, with one micro-batch and with three.
@pytest.mark.parametrize(
    "world, row, microbatches",
    [
        (world, row, (1, 3)[(turn + index) % 2])
        for turn, row in enumerate(ROWS)
        for index, world in enumerate([(2, 2), [(1, 3), (3, 1)][turn % 2]])
    ],
    ids=str,
)
def test_mean_norm_and_clipping_agree_with_the_exact_run_within_the_bound(world: tuple[int, int], row: str, microbatches: int) -> None:
    job = Job(ROWS[row], shape=ModelShape((40,)), microbatches=microbatches, clip_grad=0.3)
    exact = _first_step(world, dataclasses.replace(job, policy=POLICIES[3]))
    quantized = _first_step(world, job)
    bounds = _error_bounds(world, job)
    slack = 1e-6 * exact.grad_norm  # fp32 sums of gradients in another order
    for got, expected, bound in zip(quantized.mean, exact.mean, bounds, strict=True):
        assert ((got - expected).abs() <= bound + slack).all()
    norm_error = math.sqrt(sum(float(bound.square().sum()) for bound in bounds))  # by the triangle inequality
    assert abs(quantized.grad_norm - exact.grad_norm) <= norm_error + slack
    assert quantized.grad_norm != exact.grad_norm
    _check_clipping(job, exact, quantized, bounds)


def _check_clipping(job: Job, exact: FirstStep, quantized: FirstStep, bounds: list[Tensor]) -> None:
    """Clipped gradients have the norm asked for, and differ by no more than the gradients do and the factors."""
    factors = [job.clip_grad / (step.grad_norm + 1e-6) for step in (exact, quantized)]
    assert all(factor < 1 for factor in factors)
    for step in (exact, quantized):
        norm = math.sqrt(sum(float(clipped.double().square().sum()) for clipped in step.clipped))
        assert norm == pytest.approx(job.clip_grad, rel=1e-5)
    for got, expected, mean, bound in zip(quantized.clipped, exact.clipped, exact.mean, bounds, strict=True):
        limit = bound * factors[1] + mean.double().abs() * abs(factors[1] - factors[0]) + 1e-6
        assert ((got - expected).abs() <= limit).all()
