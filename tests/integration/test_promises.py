"""Bytes and memory are promises: what a real run reports is what the definition says, to the byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from harness.closed_forms import Features, World, inter_node_bytes, padded_numel
from harness.rank_pool import RankPool
from harness.tiny_runs import pretrain


# What is logged is the ledger's. That the ledger is the closed form in every world, row and variant: tests/zero/plan/test_traffic.py and
# test_zeropp_traffic.py; that the plan of this very model is: test_planned_traffic.py.
@pytest.mark.parametrize(
    ("world", "stage", "microbatches", "is_tied", "element_bytes"),
    [
        (World(2, 2), 0, 1, True, 4),
        (World(2, 2), 1, 4, False, 4),
        (World(2, 2), 2, 4, True, 2),
        (World(2, 2), 3, 1, False, 2),
        (World(3, 2), 3, 4, True, 2),
        (World(2, 1), 0, 4, False, 2),
    ],
    ids=str,
)
def test_bytes_between_nodes_equal_the_closed_form(
    ranks: RankPool, tmp_path: Path, world: World, stage: int, microbatches: int, is_tied: bool, element_bytes: int
) -> None:
    flags = f"--train-iters 2 --global-batch-size {world.size * microbatches} --zero-stage {stage}"
    flags += "" if is_tied else " --untie-embeddings-and-output-weights"
    flags += " --bf16" if element_bytes == 2 else ""
    records = pretrain(ranks, world.nodes, world.ranks_per_node, flags, tmp_path / "run.jsonl")
    expected = inter_node_bytes(world, stage, microbatches=microbatches, element_bytes=element_bytes, is_tied=is_tied)
    assert [record["inter_node_bytes"] for record in records] == [expected] * 2


SWITCHES = {
    "qwZ": ("--zero-quantized-weights", {"weight_bits": 8}),
    "hpZ": ("--zero-hpz-partition-size {ranks_per_node}", {"keeps_secondary": True}),
    "qgZ": ("--zero-quantized-gradients", {"gradient_bits": 4}),
}


COMBINATIONS = [names for count in range(4) for names in itertools.combinations(SWITCHES, count)]


# Each with one micro-batch or with four, all three with both.
@pytest.mark.parametrize(
    ("world", "names", "microbatches"),
    [*((World(2, 2), names, (1, 4)[index % 2]) for index, names in enumerate(COMBINATIONS)), (World(3, 2), COMBINATIONS[-1], 1)],
    ids=str,
)
def test_bytes_between_nodes_equal_the_closed_form_for_all_eight_combinations(
    ranks: RankPool, tmp_path: Path, world: World, names: tuple[str, ...], microbatches: int
) -> None:
    flags = " ".join(SWITCHES[name][0].format(ranks_per_node=world.ranks_per_node) for name in names)
    features = Features(**{key: value for name in names for key, value in SWITCHES[name][1].items()})
    run = f"--zero-stage 3 --bf16 --train-iters 2 --global-batch-size {world.size * microbatches} {flags}"
    records = pretrain(ranks, world.nodes, world.ranks_per_node, run, tmp_path / "run.jsonl")
    expected = inter_node_bytes(world, 3, microbatches=microbatches, element_bytes=2, features=features)
    assert [record["inter_node_bytes"] for record in records] == [expected] * 2


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "stage", "bytes_full", "bytes_sharded"),
    [(2, 2, 0, 18, 0), (2, 2, 1, 6, 12), (2, 2, 2, 2, 16), (2, 2, 3, 0, 16), (1, 1, 3, 0, 16)],
)
def test_model_states_take_the_bytes_of_the_policy_table(
    ranks: RankPool, tmp_path: Path, nodes: int, ranks_per_node: int, stage: int, bytes_full: int, bytes_sharded: int
) -> None:
    world_size = nodes * ranks_per_node
    records = pretrain(ranks, nodes, ranks_per_node, f"--train-iters 2 --bf16 --zero-stage {stage}", tmp_path / "run.jsonl")
    numel = padded_numel(world_size, is_tied=True)
    assert [record["model_state_bytes"] for record in records] == [numel * bytes_full + numel // world_size * bytes_sharded] * 2


def test_a_secondary_copy_takes_two_bytes_per_parameter_of_the_partition_and_about_one_when_quantized(
    ranks: RankPool, tmp_path: Path
) -> None:
    numel = padded_numel(4, is_tied=True)
    found = {}
    for name, flags in {
        "plain": "",
        "hpZ": "--zero-hpz-partition-size 2",
        "both": "--zero-hpz-partition-size 2 --zero-quantized-weights",
    }.items():
        records = pretrain(ranks, 2, 2, f"--train-iters 1 --bf16 --zero-stage 3 {flags}", tmp_path / f"{name}.jsonl")
        found[name] = records[0]["model_state_bytes"]
    assert found["hpZ"] - found["plain"] == 2 * numel / 2
    assert 1.0 * numel / 2 < found["both"] - found["plain"] < 1.25 * numel / 2  # scales of blocks of 32 are an eighth, some runs are exact
