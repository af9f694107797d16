"""A whole run whose ranks divide samples: evaluated, saved, and resumed by ranks that divide none; losses are those of whole samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.rank_pool import RankPool
from harness.tiny_runs import losses, pretrain, validation_losses

RUN = "--zero-stage 3 --seed 5 --lr 1e-3 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --eval-iters 2 --eval-interval 2"
DOCUMENTS = "--position-embedding-type rope --num-query-groups 1 --reset-position-ids --reset-attention-mask --eod-mask-loss"
LOGS = "--log-params-norm --timing-log-level 2 --hidden-dropout 0.1 --attention-dropout 0"


def numbers(records: list[dict[str, Any]], name: str) -> list[Any]:
    return [record[name] for record in records if name in record]


def test_ranks_that_share_samples_over_two_nodes_have_the_losses_of_whole_samples_and_others_continue(
    ranks: RankPool, tmp_path: Path
) -> None:
    flags = f"{RUN} {DOCUMENTS} {LOGS}"
    save = f"--save {tmp_path / 'saved'} --save-interval 2"
    shared = pretrain(ranks, 2, 2, f"{flags} --context-parallel-size 4 {save} --global-batch-size 4", tmp_path / "shared.jsonl")
    alone = pretrain(ranks, 1, 2, flags, tmp_path / "alone.jsonl")
    resumed = pretrain(ranks, 1, 2, f"{flags} --load {tmp_path / 'saved'} --ckpt-step 2", tmp_path / "resumed.jsonl")
    for name, tolerance in (("lm_loss", 1e-6), ("grad_norm", 2e-5), ("params_norm", 1e-6)):
        assert numbers(shared, name) == pytest.approx(numbers(alone, name), rel=tolerance)
    assert [loss for loss, _ in losses(resumed)] == pytest.approx(numbers(shared, "lm_loss")[2:], rel=1e-6)
    assert validation_losses(shared) == pytest.approx(validation_losses(alone), rel=1e-6)
    received, between_nodes = numbers(shared, "context_link_bytes"), numbers(shared, "context_inter_node_bytes")
    assert all(3 * into_node == 2 * 2 * into_rank > 0 for into_node, into_rank in zip(between_nodes, received, strict=True))
    of_ladder, of_both = numbers(shared, "inter_node_bytes"), numbers(shared, "inter_node_bytes_per_iteration")
    assert of_both == [weights + exchanged for weights, exchanged in zip(of_ladder, between_nodes, strict=True)]
    assert set(numbers(alone, "context_link_bytes")) == {0}
    assert numbers(shared, "consumed_samples") == numbers(alone, "consumed_samples") == [4, 8, 12, 16]
