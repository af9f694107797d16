from __future__ import annotations

import pytest
import torch
from harness.closed_forms import Unit, payload_bytes, small_units
from harness.small_engine import SECONDARY_ROW, VOCAB, Job, ModelShape, Rank, bytes_by_step
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import POLICIES

pytestmark = pytest.mark.virtual

BLOCK = 32
INNER, HIDDEN = (5, 11), 6


def _units(is_tied: bool) -> list[Unit]:
    return small_units(INNER, HIDDEN, VOCAB, is_tied=is_tied, block=BLOCK)


def _closed_form(row: str, units: list[Unit], nodes: int, ranks: int, element_bytes: int, microbatches: int) -> tuple[int, int]:
    """Bytes per step that enter a node over the inter link, and a rank over the intra link."""
    inter = intra = 0
    for unit in units:
        payload = payload_bytes(unit, nodes * ranks, 16, element_bytes)
        fp32_payload = payload_bytes(unit, nodes * ranks, 16, 4)
        crossings = {
            "stage 0": [(payload, 1, 1), (fp32_payload, 1, 1)],  # down, and the fp32 mean back up
            "stage 1": [(payload, 1, 1), (payload, 1, 1)],
            "stage 2": [(payload, 1, 1), (payload, microbatches, microbatches)],
            "stage 3": [(payload, unit.climbs * microbatches, unit.climbs * microbatches), (payload, microbatches, microbatches)],
            # weights cross the inter link once per step; gradients once, but the intra link in every micro-batch
            "secondary row": [(payload, 1, unit.climbs * microbatches), (payload, 1, microbatches)],
        }[row]
        for nbytes, over_inter, over_intra in crossings:
            inter += over_inter * (nodes - 1) * ranks * nbytes
            intra += over_intra * (ranks - 1) * nodes * nbytes
    return inter, intra


ROWS = {**{f"stage {stage}": policy for stage, policy in POLICIES.items()}, "secondary row": SECONDARY_ROW}
VARIANTS = [(torch.float32, True, 1), (torch.bfloat16, True, 3), (torch.bfloat16, False, 3), (torch.float32, False, 1)]


# Every row in three worlds and with two variants. More worlds, with codes: test_zeropp_traffic.py.
@pytest.mark.parametrize(
    "row, shape, variant",
    [
        (row, shape, (index + turn) % 4)
        for index, row in enumerate(ROWS)
        for turn, shape in enumerate([(2, 2), (3, 2), [(1, 3), (3, 1), (1, 1)][index % 3]])
    ],
    ids=str,
)
def test_the_ledger_equals_the_closed_form_to_the_byte(shape: tuple[int, int], row: str, variant: int) -> None:
    dtype, is_tied, microbatches = VARIANTS[variant]
    expected = _closed_form(row, _units(is_tied), *shape, dtype.itemsize, microbatches)
    job = Job(ROWS[row], dtype, ModelShape(INNER, HIDDEN, is_tied), steps=1, microbatches=microbatches, block_numel=BLOCK)
    assert bytes_by_step(shape, job) == [[expected]] * (shape[0] * shape[1])


def test_the_ledger_equals_the_closed_form_in_a_larger_world() -> None:
    job = Job(POLICIES[3], torch.bfloat16, ModelShape(INNER, HIDDEN), steps=1, block_numel=BLOCK)
    assert bytes_by_step((3, 4), job) == [[_closed_form("stage 3", _units(True), 3, 4, 2, 1)]] * 12


@pytest.mark.parametrize("is_tied, chunk", [(False, 1), (True, 2)])
def test_recomputation_moves_no_byte_more(is_tied: bool, chunk: int) -> None:
    shape = ModelShape(INNER, HIDDEN, is_tied, is_recomputed=True, chunk=chunk)
    job = Job(POLICIES[3], shape=shape, steps=2, microbatches=2, block_numel=BLOCK)
    assert bytes_by_step((2, 2), job) == [[_closed_form("stage 3", _units(is_tied), 2, 2, 4, 2)] * 2] * 4


@pytest.mark.parametrize("row", ["stage 0", "stage 3"])
def test_every_step_moves_the_same_bytes_and_evaluations_between_steps_are_booked_to_their_own_category(row: str) -> None:
    job = Job(ROWS[row], shape=ModelShape(INNER, HIDDEN), steps=2, microbatches=2, block_numel=BLOCK)
    expected = [[_closed_form(row, _units(True), 2, 2, 4, 2)] * 2] * 4
    assert bytes_by_step((2, 2), job) == expected
    assert bytes_by_step((2, 2), job, evaluations=2) == expected


@pytest.mark.parametrize("row", ["stage 1", "stage 2", "secondary row"])
def test_climbs_that_serve_a_whole_step_are_booked_to_it_also_where_an_evaluation_was_the_first_to_wait(row: str) -> None:
    job = Job(ROWS[row], shape=ModelShape(INNER, HIDDEN), steps=3, microbatches=2, block_numel=BLOCK)
    assert bytes_by_step((2, 2), job, evaluations=2) == [[_closed_form(row, _units(True), 2, 2, 4, 2)] * 3] * 4


# How often a unit climbs over the inter and the intra link: for every micro-batch that is evaluated (a tied embedding twice, because the
# last use reads it again), and for the first one after a step, to the rung that the next step keeps, to which these bytes are booked.
OWN_CLIMBS = {"stage 0": (0, 0), "stage 1": (0, 0), "stage 2": (0, 0), "stage 3": (1, 1), "secondary row": (0, 1)}
STEP_CLIMBS = {"stage 0": (0, 0), "stage 1": (1, 1), "stage 2": (1, 1), "stage 3": (0, 0), "secondary row": (1, 0)}


@pytest.mark.parametrize("row, shape", [*((row, (2, 2)) for row in ROWS), ("stage 3", (3, 2)), ("secondary row", (3, 2))], ids=str)
def test_evaluations_between_steps_and_at_the_end_receive_the_bytes_of_the_closed_form(row: str, shape: tuple[int, int]) -> None:
    (nodes, ranks), steps, evaluated, is_tied = shape, 2, 3, shape == (2, 2)
    job = Job(ROWS[row], torch.bfloat16, ModelShape(INNER, HIDDEN, is_tied), steps=steps, microbatches=2, block_numel=BLOCK)
    units = _units(is_tied)
    payloads = [payload_bytes(unit, nodes * ranks, 16, 2) for unit in units]
    once = [(nodes - 1) * sum(payloads), (ranks - 1) * nodes * sum(payloads)]  # over the inter link and the intra link, into one rank
    again = [(nodes - 1) * payloads[0] * is_tied, (ranks - 1) * nodes * payloads[0] * is_tied]
    own = [climbs * (first + second) for climbs, first, second in zip(OWN_CLIMBS[row], once, again, strict=True)]
    node_bytes, within = _closed_form(row, units, nodes, ranks, 2, 2)
    of_step = [node_bytes // ranks, within]
    at_the_end = [climbs * nbytes for climbs, nbytes in zip(STEP_CLIMBS[row], once, strict=True)]

    def program(backend: VirtualBackend) -> tuple[Traffic, Traffic]:
        rank = Rank(job, backend)
        for step in range(steps):
            rank.step(step)
            with torch.no_grad():
                for number in range(evaluated):
                    rank.loss(50 + number)
        rank.engine.close()
        return rank.ledger.total(Category.WEIGHTS, Category.GRADIENTS), rank.ledger.total(Category.EVALUATION)

    trained = Traffic(*(steps * nbytes + more for nbytes, more in zip(of_step, at_the_end, strict=True)))
    assert run_world(shape, program) == [(trained, Traffic(*own) * (steps * evaluated))] * (nodes * ranks)


def test_partitions_smaller_than_a_node_cross_the_inter_lane_within_a_node_without_entering_it() -> None:
    grid = Grid(world_size=8, ranks_per_node=4, partition_ranks=2)
    job = Job(POLICIES[3], shape=ModelShape(INNER, HIDDEN), steps=1, block_numel=BLOCK)
    entering = within = 0
    for unit in _units(True):
        payload = payload_bytes(unit, 8, 16, 4)
        crossings = unit.climbs + 1
        entering += crossings * payload * 2 * 4  # two members of the other node, for each of four ranks
        within += crossings * payload * (1 + 4)  # one member of the own node, and the whole other secondary rung
    assert bytes_by_step(grid, job) == [[(entering, within)]] * 8


def test_the_closed_form_is_the_rounded_table_of_the_family_for_a_model_without_padding() -> None:
    unit = Unit((1024, 512), 128, 2, block=4)
    m_bytes = 2 * (1024 + 512 + 128)
    share = {row: _closed_form(row, [unit], 4, 4, 2, 4)[0] / (m_bytes * 3 / 4) for row in ROWS}
    assert share["stage 0"] == 3 and share["stage 1"] == 2 and share["stage 2"] == 5 and share["stage 3"] == 12
