"""Bytes and memory are promises: what a real run reports is what the definition says, to the byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from harness.closed_forms import INT4, INT8, Features, inter_node_bytes, padded_numel
from harness.rank_pool import RankPool
from harness.tiny_runs import pretrain

from megatron_zpp.parallel.grid import Grid

Records = list[dict[str, Any]]
RunOf = Callable[[Grid, str], Records]
# Bytes of model states in 16 bits per parameter, by stage: of all parameters on every rank, and of the slice of each.
STATE_BYTES = {0: (18, 0), 1: (6, 12), 2: (2, 16), 3: (0, 16)}


@pytest.fixture(scope="module")
def run_of(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """What a run of two steps with these flags logs. Tests that look at the same run share it."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(grid: Grid, flags: str) -> Records:
        return pretrain(ranks, grid.nodes, grid.ranks_per_node, f"--train-iters 2 {flags}", folder / f"{grid} {flags}.jsonl")

    return run


# What is logged is the ledger's. That the ledger is the closed form in every world, row and variant: tests/zero/test_traffic.py;
# that planned bytes are: tests/training/plan/test_planned_bytes.py.
@pytest.mark.parametrize(
    ("grid", "stage", "microbatches", "is_tied", "element_bytes"),
    [
        (Grid.of_nodes(2, 2), 0, 1, True, 2),
        (Grid.of_nodes(2, 2), 1, 2, False, 2),
        (Grid.of_nodes(2, 2), 2, 2, True, 2),
        (Grid.of_nodes(2, 2), 3, 1, False, 2),
        (Grid.of_nodes(3, 2), 3, 2, True, 4),
        (Grid.of_nodes(2, 1), 0, 2, False, 4),
        (Grid.of_nodes(1, 1), 3, 1, True, 2),
    ],
    ids=str,
)
def test_bytes_between_nodes_equal_the_closed_form_and_model_states_take_those_of_the_policy_table(
    run_of: RunOf, grid: Grid, stage: int, microbatches: int, is_tied: bool, element_bytes: int
) -> None:
    flags = f"--global-batch-size {grid.world_size * microbatches} --zero-stage {stage}"
    flags += "" if is_tied else " --untie-embeddings-and-output-weights"
    flags += " --bf16" if element_bytes == 2 else ""
    records = run_of(grid, flags)
    expected = inter_node_bytes(Features(stage), grid, microbatches=microbatches, element_bytes=element_bytes, is_tied=is_tied)
    assert [record["inter_node_bytes"] for record in records] == [expected] * 2
    if element_bytes == 2:
        numel, (bytes_full, bytes_sharded) = padded_numel(grid.world_size, is_tied=is_tied), STATE_BYTES[stage]
        assert [record["model_state_bytes"] for record in records] == [numel * bytes_full + numel // grid.world_size * bytes_sharded] * 2


SWITCHES = {
    "qwZ": ("--zero-quantized-weights", {"weights": INT8}),
    "hpZ": ("--zero-hpz-partition-size {ranks_per_node}", {"keeps_secondary": True}),
    "qgZ": ("--zero-quantized-gradients", {"gradients": INT4}),
}
COMBINATIONS = [names for count in range(4) for names in itertools.combinations(SWITCHES, count)]


def flags_of(grid: Grid, names: tuple[str, ...], microbatches: int = 1) -> str:
    switches = " ".join(SWITCHES[name][0].format(ranks_per_node=grid.ranks_per_node) for name in names)
    return f"--zero-stage 3 --bf16 --global-batch-size {grid.world_size * microbatches} {switches}"


# Each with one micro-batch or with two, all three with both.
@pytest.mark.parametrize(
    ("grid", "names", "microbatches"),
    [
        *((Grid.of_nodes(2, 2), names, (1, 2)[index % 2]) for index, names in enumerate(COMBINATIONS)),
        (Grid.of_nodes(3, 2), COMBINATIONS[-1], 1),
    ],
    ids=str,
)
def test_bytes_between_nodes_equal_the_closed_form_for_all_eight_combinations(
    run_of: RunOf, grid: Grid, names: tuple[str, ...], microbatches: int
) -> None:
    features = Features(**{key: value for name in names for key, value in SWITCHES[name][1].items()})
    expected = inter_node_bytes(features, grid, microbatches=microbatches, element_bytes=2)
    assert [record["inter_node_bytes"] for record in run_of(grid, flags_of(grid, names, microbatches))] == [expected] * 2


def test_a_secondary_copy_takes_two_bytes_per_parameter_of_the_partition_and_about_one_when_quantized(run_of: RunOf) -> None:
    grid, numel = Grid.of_nodes(2, 2), padded_numel(4, is_tied=True)
    plain, kept, both = (run_of(grid, flags_of(grid, names))[0]["model_state_bytes"] for names in ((), ("hpZ",), ("qwZ", "hpZ")))
    assert kept - plain == 2 * numel / 2
    assert 1.0 * numel / 2 < both - plain < 1.25 * numel / 2  # scales of blocks of 32 are an eighth, some runs are exact
