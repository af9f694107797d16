"""The memory of a planned engine against what real engines of a virtual world hold, for every row of the policy table."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.codes import LinkBits, code
from harness.live_rank import held_by_small_ranks
from harness.planned_engine import ALL, KEPT, UNOFFERED, planned_step
from harness.planned_rank import check_peak, peak_of, recorded, run_of, states_of
from harness.small_engine import ROWS, Job, ModelShape
from torch import nn

from megatron_zpp.ops import extension
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import ParamSpec, UnitSpec, Use
from megatron_zpp.training.plan.kinds import COPY, GRADIENTS, OPTIMIZER, PAYLOADS, WEIGHTS
from megatron_zpp.training.plan.step_record import StepRecord
from megatron_zpp.zero.policy import (
    POLICIES,
    Policy,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
)
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual


QUANTIZED = {
    "qwZ": with_quantized_weights(POLICIES[3]),
    "qwZ in stage 1": with_quantized_weights(POLICIES[1], code(4)),
    "hpZ": with_secondary_weights(POLICIES[3]),
    "qgZ": with_quantized_gradients(POLICIES[3]),
    "ZeRO++": ALL,
    "two codecs": replace(with_secondary_weights(POLICIES[3]), weight_codes=LinkBits(4, 8).codes()),
    "two codecs, no copy": replace(POLICIES[3], weight_codes=LinkBits(4, 8).codes()),
}
POLICIES_BY_NAME = {**ROWS, **QUANTIZED, **KEPT, **UNOFFERED}
GRIDS = [Grid.of_nodes(2, 2), Grid.of_nodes(3, 1), Grid.of_nodes(1, 2), Grid.of_nodes(2, 1)]
IN_TWO_BY_TWO = ("ZeRO++", "differences in integers")  # codes on a secondary rung of several ranks
PAIRS: list[Any] = [(name, GRIDS[0 if name in IN_TWO_BY_TWO else index % 4]) for index, name in enumerate(POLICIES_BY_NAME)]
OTHER_GRIDS = [Grid.of_nodes(3, 2), *GRIDS[2:], GRIDS[0]]
PAIRS += [pytest.param(name, OTHER_GRIDS[index % 4], marks=pytest.mark.long) for index, name in enumerate(POLICIES_BY_NAME)]


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Plans are of ranks whose kernels are built; those in Python make more tensors."""
    extension.load()


def job_of(name: str) -> Job:
    """Blocks are alike, as those of a GPT are, and wide enough that a block of 256 values is small beside a slice."""
    shape = ModelShape(inner=(400,) * 3, hidden=48)
    return Job(POLICIES_BY_NAME[name], torch.bfloat16, shape, microbatches=2, block_numel=256)


@pytest.mark.parametrize(("name", "grid"), PAIRS, ids=str)
def test_planned_states_are_those_of_the_engine_to_the_byte_and_the_planned_peak_holds_its_own_with_all_buffers(
    name: str, grid: Grid
) -> None:
    held, step = held_by_small_ranks(job_of(name), grid), planned_step(job_of(name), grid).engine
    assert {rank.states for rank in held} == {sum(states_of(step).values())}
    check_peak(peak_of(step).by_kind, held)


@pytest.mark.parametrize(
    ("prefetch", "is_tied", "chunk"),
    [(Prefetch(), True, 1), (Prefetch(0, 0), False, 0), (Prefetch(0, 0), True, 3), (Prefetch(3, 2), False, 1), (Prefetch(3, 2), False, 3)],
    ids=str,
)
def test_the_planned_peak_holds_the_units_that_are_gathered_ahead_and_those_of_recomputed_chunks(
    prefetch: Prefetch, is_tied: bool, chunk: int
) -> None:
    shape = ModelShape(inner=(400,) * 3, hidden=48, is_tied=is_tied, is_recomputed=chunk > 0, chunk=max(1, chunk))
    job, grid = Job(POLICIES[3], shape=shape, prefetch=prefetch), Grid.of_nodes(2, 2)
    check_peak(peak_of(planned_step(job, grid).engine).by_kind, held_by_small_ranks(job, grid))


def test_planned_buffers_and_gathered_units_do_not_grow_with_depth() -> None:
    plans = [planned_step(Job(POLICIES[3], shape=ModelShape(inner=(40,) * layers)), Grid.of_nodes(2, 2)).engine for layers in (8, 16)]
    fewer, more = (peak_of(plan).by_kind for plan in plans)
    assert fewer[PAYLOADS] == more[PAYLOADS] and fewer["gathered units"] == more["gathered units"]


# ---- closed forms

NUMEL = 1024 * 256


def one_unit(policy: Policy, grid: Grid, *, starts_exact: bool = False) -> StepRecord:
    """A step of one product of NUMEL weights in bf16."""
    with torch.device("meta"):
        module = nn.ModuleDict({"only": nn.Linear(256, 1024, bias=False, dtype=torch.bfloat16)})
        values = torch.empty(2, 256, dtype=torch.bfloat16)
    weight = ParamSpec("only.weight", Division.undivided((1024, 256)), lambda start, stop: torch.empty(stop - start, device="meta"), True)
    units, uses = (UnitSpec("unit", (weight,)),), (Use("only", ("unit",), needs_weights_in_backward=True),)
    record = recorded(module, units, uses, lambda: module["only"](values).sum())
    job = Job(policy, torch.bfloat16, block_numel=256, full_precision_iterations=int(starts_exact))
    return run_of(record, job.options(), grid)


def test_zeropp_rests_in_16_bytes_per_parameter_of_the_world_and_one_of_the_partition() -> None:
    states = states_of(one_unit(ALL, Grid(64, 16, 16)))
    assert (states[WEIGHTS], states[GRADIENTS], states[OPTIMIZER]) == (4 * NUMEL // 64, 4 * NUMEL // 64, 8 * NUMEL // 64)
    assert states[COPY] == NUMEL // 16 + NUMEL // 256 * 4 // 16  # codes of one byte, and a scale per block


def test_states_of_stage_3_are_a_share_of_the_world() -> None:
    for nodes, ranks_per_node in itertools.product((1, 2, 4), (1, 4)):
        states = states_of(one_unit(POLICIES[3], Grid.of_nodes(nodes, ranks_per_node)))
        assert sum(states.values()) * nodes * ranks_per_node == 16 * NUMEL


def test_the_copy_takes_2_bytes_per_parameter_of_a_partition_and_sums_inside_it_4() -> None:
    plain, once, summed = (
        states_of(planned_step(replace(job_of(name), microbatches=1), Grid(8, 4, 4)).engine)
        for name in ("stage 3", "lean stage 3", "lean stage 3, summed")
    )
    owned = plain[GRADIENTS] // 4  # of a partition there are twice as many
    assert sum(plain.values()) == 16 * owned
    assert (plain.get(COPY, 0), once[COPY], summed[COPY]) == (0, 2 * 2 * owned, 2 * 2 * owned)
    assert (once[GRADIENTS], summed[GRADIENTS]) == (4 * owned, 4 * 2 * owned)


def test_a_run_that_starts_in_full_precision_is_planned_with_its_larger_copy() -> None:
    quantized, exact = (peak_of(one_unit(ALL, Grid(4, 2, 2), starts_exact=starts)) for starts in (False, True))
    assert exact.by_kind[COPY] == 2 * NUMEL // 2 > quantized.by_kind[COPY] and exact.total > quantized.total
