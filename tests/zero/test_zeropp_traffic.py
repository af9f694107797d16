from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch
from harness.closed_forms import Unit, payload_bytes, small_units
from harness.codes import LinkBits, code
from harness.matrix_model import BLOCK as MATRIX_BLOCK
from harness.matrix_model import PARAMETERS, WORLD, MatrixRank
from harness.small_engine import VOCAB, Job, ModelShape, bytes_by_step
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Category
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.policy import (
    POLICIES,
    Policy,
    with_quantized_gradients,
    with_quantized_weights,
    with_secondary_weights,
)

pytestmark = pytest.mark.virtual

BLOCK = 32
INNER, HIDDEN = (40,), 6
EXACT, INT8, INT4 = LinkBits(16, 16), LinkBits(8, 8), LinkBits(4, 4)
WORLDS = [(nodes, ranks) for nodes, ranks in itertools.product(range(1, 5), range(1, 5)) if nodes * ranks <= 8]
PROMISED = [(2, 2), (2, 4), (4, 2), (3, 2)]


@dataclass(frozen=True)
class Features:
    """A member of the family: its stage, and what crosses the links in how many bits (16: the working precision)."""

    stage: int = 3
    keeps_secondary: bool = False
    weights: LinkBits = EXACT
    gradients: LinkBits = EXACT

    def policy(self) -> Policy:
        policy = with_secondary_weights(POLICIES[self.stage]) if self.keeps_secondary else POLICIES[self.stage]
        if self.gradients != EXACT:
            policy = with_quantized_gradients(policy, self.gradients.codes())
        if self.weights.inter == self.weights.intra != 16:
            return with_quantized_weights(policy, code(self.weights.inter))
        return dataclasses.replace(policy, weight_codes=self.weights.codes())


COMBINATIONS = {
    "ZeRO-3": Features(),
    "qwZ": Features(weights=INT8),
    "hpZ": Features(keeps_secondary=True),
    "qgZ": Features(gradients=INT4),
    "qwZ+hpZ": Features(keeps_secondary=True, weights=INT8),
    "qwZ+qgZ": Features(weights=INT8, gradients=INT4),
    "hpZ+qgZ": Features(keeps_secondary=True, gradients=INT4),
    "all": Features(keeps_secondary=True, weights=INT8, gradients=INT4),
}
LOWER_STAGES = {
    f"stage {stage} {name}": dataclasses.replace(COMBINATIONS[name], stage=stage) for stage in (1, 2) for name in ("qwZ", "qgZ", "qwZ+qgZ")
}
OTHER_BITS = {
    "4-bit weights": Features(weights=INT4),
    "4-bit weights, hpZ": Features(keeps_secondary=True, weights=INT4),
    "weights 8 between, 16 inside": Features(weights=LinkBits(8, 16)),
    "weights 4 between, 8 inside, hpZ": Features(keeps_secondary=True, weights=LinkBits(4, 8)),
    "8-bit gradients": Features(gradients=INT8),
    "gradients 4 between, 8 inside": Features(gradients=LinkBits(4, 8)),
    "gradients 4 between, 16 inside": Features(gradients=LinkBits(4, 16)),
    "gradients 16 between, 4 inside": Features(gradients=LinkBits(16, 4)),
}


# ---- the closed form


def _units(is_tied: bool = True) -> list[Unit]:
    return small_units(INNER, HIDDEN, VOCAB, is_tied=is_tied, block=BLOCK)


@dataclass(frozen=True)
class Ranks:
    """A world: all ranks, those of a node, and those among which a secondary rung is split."""

    world: int
    per_node: int
    partition: int

    def received(self, members: list[int], nbytes: int) -> tuple[int, int]:
        """What rank 0 gets from each other member: over the border of its node, and within."""
        other_nodes = sum(member >= self.per_node for member in members)
        return other_nodes * nbytes, (len(members) - 1 - other_nodes) * nbytes


def _closed_form(features: Features, units: list[Unit], ranks: Ranks, element_bytes: int, microbatches: int) -> tuple[int, int]:
    """Bytes per step that enter a node, and that a rank gets from ranks of its own node; the same for every rank."""
    over_inter = list(range(0, ranks.world, ranks.partition))
    over_intra = list(range(ranks.partition))
    entering = within = 0
    for unit in units:
        climbs = unit.climbs * microbatches if features.stage == 3 else 1
        descents = 1 if features.stage == 1 else microbatches
        inter, intra = len(over_inter), len(over_intra)
        payload = {bits: payload_bytes(unit, ranks.world, bits, element_bytes) for bits in (4, 8, 16)}
        messages = [
            (over_inter, payload[features.weights.inter], 1 if features.keeps_secondary else climbs),
            (over_intra, payload[features.weights.intra] * inter, climbs),
            (over_intra, payload[features.gradients.intra] * (ranks.world // intra), descents),
            (over_inter, payload[features.gradients.inter], descents),
        ]
        for members, nbytes, times in messages:
            from_others, from_own = ranks.received(members, nbytes)
            entering += times * from_others * ranks.per_node
            within += times * from_own
    return entering, within


# ---- the ledger


def _check(features: Features, grid: Grid, dtype: torch.dtype, microbatches: int, is_tied: bool = True, steps: int = 1) -> None:
    ranks = Ranks(grid.world_size, grid.ranks_per_node, grid.partition_ranks)
    expected = _closed_form(features, _units(is_tied), ranks, dtype.itemsize, microbatches)
    shape = ModelShape(INNER, HIDDEN, is_tied)
    job = Job(features.policy(), dtype, shape, steps=steps, microbatches=microbatches, block_numel=BLOCK)
    assert bytes_by_step(grid, job) == [[expected] * steps] * grid.world_size


# Every combination with three micro-batches, and every promised world.
@pytest.mark.parametrize(
    "world, name, microbatches", [(PROMISED[index % len(PROMISED)], name, 3) for index, name in enumerate(COMBINATIONS)], ids=str
)
def test_each_combination_moves_the_bytes_of_the_closed_form(world: tuple[int, int], name: str, microbatches: int) -> None:
    _check(COMBINATIONS[name], Grid.of_nodes(*world), torch.bfloat16, microbatches)


@pytest.mark.parametrize("world", [world for world in WORLDS if world not in PROMISED], ids=str)
def test_the_bytes_of_other_worlds_are_those_of_the_closed_form_too(world: tuple[int, int]) -> None:
    turn = 3 * world[0] + 5 * world[1]
    name = list(COMBINATIONS)[turn % len(COMBINATIONS)]
    dtype = [torch.float32, torch.bfloat16][turn % 2]
    _check(COMBINATIONS[name], Grid.of_nodes(*world), dtype, microbatches=1 + turn % 2, is_tied=turn % 4 < 2)


# All in a world with two links; with one, those whose links differ, and one of each kind.
@pytest.mark.parametrize(
    "world, name",
    [
        *(((2, 2), name) for name in (*LOWER_STAGES, *OTHER_BITS)),
        *(((1, 3), name) for name in ("weights 8 between, 16 inside", "gradients 4 between, 8 inside", "gradients 16 between, 4 inside")),
        *(((3, 1), name) for name in ("weights 4 between, 8 inside, hpZ", "gradients 4 between, 16 inside", "stage 1 qwZ+qgZ")),
    ],
    ids=str,
)
def test_lower_stages_and_other_bits_move_the_bytes_of_the_closed_form(world: tuple[int, int], name: str) -> None:
    _check({**LOWER_STAGES, **OTHER_BITS}[name], Grid.of_nodes(*world), torch.bfloat16, microbatches=2)


@pytest.mark.parametrize("partition, name", [(1, "all"), *((2, name) for name in ("ZeRO-3", "hpZ", "qwZ+qgZ", "all"))])
def test_partitions_smaller_than_a_node_move_the_bytes_of_the_closed_form(partition: int, name: str) -> None:
    _check(COMBINATIONS[name], Grid(8, ranks_per_node=4, partition_ranks=partition), torch.bfloat16, microbatches=2)


@pytest.mark.parametrize("name", ["qwZ", "all"])
def test_every_step_moves_the_same_bytes(name: str) -> None:
    _check(COMBINATIONS[name], Grid.of_nodes(2, 2), torch.bfloat16, microbatches=2, steps=3)


# ---- the table of the design


@pytest.mark.parametrize("name, microbatches", [(name, (1, 4)[index % 2]) for index, name in enumerate(COMBINATIONS)], ids=str)
def test_without_padding_bytes_between_nodes_are_those_of_the_table_plus_the_scales(name: str, microbatches: int) -> None:
    def program(backend: VirtualBackend) -> tuple[int, int]:
        rank = MatrixRank(COMBINATIONS[name].policy(), backend)
        rank.accumulate(microbatches)
        rank.engine.step(1e-3)
        rank.engine.close()
        return tuple(rank.ledger.inter_node_bytes(rank.ledger.total(each)) for each in (Category.WEIGHTS, Category.GRADIENTS))  # type: ignore[return-value]

    k = microbatches
    table = {
        "ZeRO-3": 3 * k,
        "qwZ": 2 * k,
        "hpZ": 1 + k,
        "qgZ": 2.25 * k,
        "qwZ+hpZ": 0.5 + k,
        "qwZ+qgZ": 1.25 * k,
        "hpZ+qgZ": 1 + 0.25 * k,
        "all": 0.5 + 0.25 * k,
    }
    unit_bytes = 2 * PARAMETERS * (WORLD[0] - 1) / WORLD[0]
    features = COMBINATIONS[name]
    coded_weights, coded_gradients = features.weights == INT8, features.gradients == INT4
    scales = {True: 4 / MATRIX_BLOCK, False: 0.0}  # bytes per parameter
    crossings = 1 if features.keeps_secondary else 2 * k
    extra = (crossings * scales[coded_weights] + k * scales[coded_gradients]) / 2
    for weights, gradients in run_world(WORLD, program):
        assert (weights + gradients) / unit_bytes == table[name] + extra
        assert weights / unit_bytes == crossings * ((1 if coded_weights else 2) + scales[coded_weights]) / 2
        assert crossings * scales[coded_weights] / 2 <= 0.016 * weights / unit_bytes
        assert k * scales[coded_gradients] / 2 <= 0.032 * gradients / unit_bytes
