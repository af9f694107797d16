"""Bytes and memory are promises: what a real run reports is what the definition says, to the byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from closed_forms import inter_node_bytes, padded_numel
from distributed import RankPool

from runs import pretrain


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (2, 2), (3, 2)])
def test_bytes_between_nodes_equal_the_closed_form(
    ranks: RankPool, tmp_path: Path, nodes: int, ranks_per_node: int, stage: int, microbatches: int
) -> None:
    world_size = nodes * ranks_per_node
    for is_tied, precision in itertools.product([True, False], ["", "--bf16"]):
        flags = f"--train-iters 3 --global-batch-size {world_size * microbatches} --zero-stage {stage} {precision}"
        flags += "" if is_tied else " --untie-embeddings-and-output-weights"
        records = pretrain(ranks, nodes, ranks_per_node, flags, tmp_path / f"{is_tied}{precision}.jsonl")
        expected = inter_node_bytes(
            stage,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            microbatches=microbatches,
            element_bytes=2 if precision else 4,
            is_tied=is_tied,
        )
        assert [record["inter_node_bytes"] for record in records] == [expected] * 3


@pytest.mark.parametrize(("stage", "bytes_full", "bytes_sharded"), [(0, 18, 0), (1, 6, 12), (2, 2, 16), (3, 0, 16)])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 1), (2, 1), (2, 2)])
def test_model_states_take_the_bytes_of_the_policy_table(
    ranks: RankPool, tmp_path: Path, nodes: int, ranks_per_node: int, stage: int, bytes_full: int, bytes_sharded: int
) -> None:
    world_size = nodes * ranks_per_node
    records = pretrain(ranks, nodes, ranks_per_node, f"--train-iters 2 --bf16 --zero-stage {stage}", tmp_path / "run.jsonl")
    numel = padded_numel(world_size, is_tied=True)
    assert [record["model_state_bytes"] for record in records] == [numel * bytes_full + numel // world_size * bytes_sharded] * 2
