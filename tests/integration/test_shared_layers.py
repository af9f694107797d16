"""A whole run whose ranks share layers: ZeRO++ on two nodes of four, saved, evaluated and resumed by ranks that share none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.rank_pool import RankPool
from harness.tiny_runs import losses, pretrain, validation_losses

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.model.tensor_traffic import tensor_traffic
from megatron_zpp.training.run_plan import shape_of

SHARED = "--tensor-model-parallel-size 2 --sequence-parallel"
RUN = "--zeropp paper --seed 5 --global-batch-size 8 --train-iters 4 --eval-iters 1 --eval-interval 2 --attention-dropout 0"
LOGS = "--log-params-norm --log-num-zeros-in-grad --log-throughput --timing-log-level 2"


def numbers(records: list[dict[str, Any]], name: str) -> list[Any]:
    return [record[name] for record in records if name in record]


def test_zeropp_trains_with_shared_layers_and_ranks_that_share_none_continue(ranks: RankPool, tmp_path: Path) -> None:
    save = f"--save {tmp_path / 'saved'} --save-interval 2"
    shared = pretrain(ranks, 2, 4, f"{RUN} {SHARED} {LOGS} {save}", tmp_path / "shared.jsonl")
    alone = pretrain(ranks, 2, 2, f"{RUN} {LOGS}", tmp_path / "alone.jsonl")  # as many data ranks
    resume = f"--load {tmp_path / 'saved'} --ckpt-step 2"
    resumed = pretrain(ranks, 2, 2, f"{RUN} {resume}", tmp_path / "resumed.jsonl")
    # Parts of a matrix have other blocks than the whole, so quantized values differ.
    for name, tolerance in (("lm_loss", 2e-3), ("grad_norm", 5e-2), ("params_norm", 1e-3)):
        assert numbers(shared, name) == pytest.approx(numbers(alone, name), rel=tolerance)
    assert [loss for loss, _ in losses(resumed)] == pytest.approx(numbers(shared, "lm_loss")[2:], rel=2e-3)
    assert validation_losses(shared) == pytest.approx(validation_losses(alone), rel=2e-3)
    assert numbers(shared, "consumed_samples") == numbers(alone, "consumed_samples")
    assert numbers(alone, "tensor_link_bytes") == [0] * 4
    topology = json.loads((tmp_path / "saved" / "iter_0000002" / "manifest.json").read_text())["topology"]
    assert (topology["world_size"], topology["tensor_ranks"]) == (8, 2)


def test_the_tensor_links_bytes_in_the_log_are_the_closed_form(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"--zero-stage 3 {SHARED} --global-batch-size 4 --train-iters 2"
    records = pretrain(ranks, 1, 4, flags, tmp_path / "log.jsonl")
    config = resolve(parse_flags(f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 {flags}".split()), 4, 4)
    traffic = tensor_traffic(shape_of(config, 104), microbatches=2, samples=1, element_bytes=4)
    found = numbers(records, "tensor_link_bytes")
    assert len(set(found)) == 1 and found[0] > traffic.training.nbytes
