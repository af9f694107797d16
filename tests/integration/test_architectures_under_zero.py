"""Where states rest changes no bit of any architecture, and quantization changes little."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.rank_pool import RankPool
from harness.small_engine import CPU, RecordingLanes
from harness.small_gpt import ARCHITECTURES, VOCAB, small_config
from harness.tiny_runs import TINY, entry, losses, pretrain
from harness.worlds import run_world

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES, Policy, with_quantized_gradients, with_quantized_weights, with_secondary_weights

STEPS, SAMPLES = 2, 2
SECONDARY = with_secondary_weights(POLICIES[3])
ALL_THREE = with_quantized_gradients(with_quantized_weights(SECONDARY))
# Single runs with and without quantization end about 1 % apart (docs/numerics.md).
BOUND = 0.011
# A 4-bit code is off by up to m / 14, m / 24 in the mean square, where m is the largest value of its block: with m of 2 to 3 times the
# block's own mean square, two such hops add up to 3 % to the squares, and half of that to the norm; a few blocks of outliers add more.
NORM_BOUND = 0.05


def history(config: ModelConfig, policy: Policy, backend: VirtualBackend) -> list[tuple[float, float]]:
    """Loss of this rank and global gradient norm, per step."""
    model = GPT(config, VOCAB, 11, torch.bfloat16)
    links = Links(backend, RecordingLanes(), Ledger(backend.grid, backend.rank), CPU)
    options = EngineOptions(policy, torch.bfloat16, block_numel=32, clip_grad=0.5)
    engine = ZeroEngine(model, model.unit_specs(), model.uses(), options, links)
    found = []
    for step in range(STEPS):
        first_sample = (step * backend.grid.world_size + backend.rank) * SAMPLES
        text = torch.randint(VOCAB, (SAMPLES, 13), generator=torch.Generator().manual_seed(first_sample))
        loss = model(text[:, :-1], text[:, 1:], first_sample=first_sample).mean()
        engine.backward(loss, microbatches=1, is_last_microbatch=True)
        found.append((loss.item(), engine.step(1e-3).grad_norm))
    engine.close()
    return found


def histories(config: ModelConfig, policy: Policy) -> list[list[tuple[float, float]]]:
    return run_world((2, 2), lambda backend: history(config, policy, backend))


# Qwen3 has all that the other two have.
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ("GPT-2 untied", "Llama")])
def test_stage_3_with_a_secondary_copy_has_the_bits_of_stage_0_and_all_three_stay_near(architecture: str) -> None:
    config = small_config(**ARCHITECTURES[architecture])
    plain, secondary, quantized = (histories(config, policy) for policy in (POLICIES[0], SECONDARY, ALL_THREE))
    assert secondary == plain
    assert quantized != plain
    for rank, expected in zip(quantized, plain, strict=True):
        assert [loss for loss, _ in rank] == pytest.approx([loss for loss, _ in expected], rel=BOUND)
        assert [norm for _, norm in rank] == pytest.approx([norm for _, norm in expected], rel=NORM_BOUND)


LLAMA = "--position-embedding-type rope --use-rope-scaling --normalization RMSNorm --swiglu --ffn-hidden-size 48 --disable-bias-linear "
LLAMA += "--add-qkv-bias --num-query-groups 2 --qk-layernorm --untie-embeddings-and-output-weights --attention-dropout 0"
OTHER = "--use-rotary-position-embeddings --rotary-interleaved --rotary-percent 0.5 --squared-relu --apply-layernorm-1p "
OTHER += "--group-query-attention --kv-channels 12 --attention-backend unfused --reset-position-ids --reset-attention-mask"
FEATURES = "--zero-stage 3 --zero-hpz-partition-size 2"


@pytest.mark.parametrize("architecture", [LLAMA, pytest.param(OTHER, marks=pytest.mark.long)], ids=["llama", "other"])
def test_whole_runs_of_other_architectures_have_the_same_bits_in_stage_0_and_in_stage_3_with_a_secondary_copy(
    ranks: RankPool, tmp_path: Path, architecture: str
) -> None:
    run = f"--train-iters 3 --bf16 --lr 1e-3 {architecture}"
    plain, secondary = (
        losses(pretrain(ranks, 2, 2, f"{run} {flags}", tmp_path / f"{number}.jsonl")) for number, flags in enumerate(["", FEATURES])
    )
    assert len(plain) == 3 and secondary == plain


def test_a_kernel_that_is_not_here_ends_the_run_before_it_starts(ranks: RankPool) -> None:
    codes = ranks.run(1, 2, entry, [*TINY, "--train-iters", "1", "--attention-backend", "fused"])
    assert codes == [2, 2]
