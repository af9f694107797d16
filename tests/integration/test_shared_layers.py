"""A whole run whose ranks share layers: ZeRO++ on two nodes of four, saved, evaluated and resumed by ranks that share none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.rank_pool import RankPool
from harness.tiny_runs import MODEL, losses, pretrain, validation_losses

from megatron_zpp.comm.ledger import Category
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.members import PlannedWorld
from megatron_zpp.training.run_plan import plan_as_given

SHARED = "--tensor-model-parallel-size 2 --sequence-parallel"
RUN = "--zeropp paper --seed 5 --global-batch-size 8 --train-iters 3 --eval-iters 1 --eval-interval 2 --attention-dropout 0"
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
    assert numbers(alone, "tensor_link_bytes") == [0] * 3
    topology = json.loads((tmp_path / "saved" / "iter_0000002" / "manifest.json").read_text())["topology"]
    assert (topology["world_size"], topology["tensor_ranks"]) == (8, 2)


def test_states_and_bytes_in_the_log_are_those_of_the_plan(ranks: RankPool, tmp_path: Path) -> None:
    flags = f"{MODEL} {SHARED} --zero-stage 3 --quantization-block-size 32 --global-batch-size 4 --train-iters 2"
    records = pretrain(ranks, 1, 4, flags, tmp_path / "log.jsonl")
    world = PlannedWorld(1, 4, is_on_gpu=False)
    plan = plan_as_given(resolve(parse_flags(flags.split()), 4, 4), world, 104)
    assert set(numbers(records, "model_state_bytes")) == {plan.memory.states}
    assert set(numbers(records, "inter_node_bytes")) == {plan.node_bytes} == {0}
    activations = plan.step.traffic(Category.ACTIVATIONS).tensor_bytes
    assert all(activations < nbytes <= plan.tensor_bytes for nbytes in numbers(records, "tensor_link_bytes"))


def test_inputs_and_optimizer_elsewhere_change_no_bit_of_a_run_nor_of_one_that_goes_on_and_add_a_gather_per_chunk(
    ranks: RankPool, tmp_path: Path
) -> None:
    config = resolve(parse_flags(MODEL.split()), 1, 1).model
    flags = "--zero-stage 3 --tensor-model-parallel-size 2 --checkpoint-activations --global-batch-size 2 --train-iters 3 --eval-iters 1"
    plain = pretrain(ranks, 1, 2, f"{flags} --eval-interval 1", tmp_path / "plain.jsonl")
    elsewhere = "--partition-activations --cpu-checkpointing --contigious-checkpointing --optimizer-cpu-offload"
    saves = f"--save {tmp_path / 'saved'} --save-interval 2 --async-save"
    divided = pretrain(ranks, 1, 2, f"{flags} --eval-interval 1 {elsewhere} {saves}", tmp_path / "divided.jsonl")
    resume = f"--load {tmp_path / 'saved'} --ckpt-step 2"
    resumed = pretrain(ranks, 1, 2, f"{flags} --eval-interval 1 {resume}", tmp_path / "resumed.jsonl")
    for name in ("lm_loss", "grad_norm"):
        assert numbers(divided, name) == numbers(plain, name)
        assert numbers(resumed, name) == numbers(plain, name)[2:]
    assert validation_losses(divided) == validation_losses(plain)
    gather = config.seq_length * config.hidden_size * 4 // 2
    more = [there - here for here, there in zip(*(numbers(of, "tensor_link_bytes") for of in (plain, divided)), strict=True)]
    assert more == [2 * config.num_layers * gather] * 3
