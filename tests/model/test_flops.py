from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.small_gpt import ARCHITECTURES, LLAMA, VOCAB, sample_batch, small_config, small_gpt
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.model.flops import (
    hardware_flops,
    model_flops,
    parameter_count,
    recomputes_logits,
)
from megatron_zpp.model.gpt import GPT

RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "every block": {"recompute_granularity": "full"},
    "chunks of two": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "the first block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}


def gpt_config(layers: int, hidden: int, heads: int, length: int, recompute: bool = False) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=4 * hidden,
        kv_channels=hidden // heads,
        seq_length=length,
        max_position_embeddings=length,
        recompute_granularity="full" if recompute else None,
    )


def test_gpt2_small_has_its_published_number_of_parameters() -> None:
    config = gpt_config(layers=12, hidden=768, heads=12, length=1024)
    model = GPT(config, 50257, 1, torch.float32)
    assert parameter_count(config, 50257) == 124_439_808
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_parameter_count_is_that_of_the_model(architecture: str) -> None:
    config = small_config(**ARCHITECTURES[architecture])
    specs = [spec for unit in GPT(config, VOCAB, 1, torch.float32).unit_specs() for spec in unit.params]
    assert parameter_count(config, VOCAB) == sum(math.prod(spec.whole_shape) for spec in specs)


def test_parameters_and_operations_of_a_gated_block_with_shared_heads_are_those_counted_by_hand() -> None:
    """One block: H 24, 4 query heads and 2 key heads of 10 channels, a gated layer of 40, no biases, RMSNorm; a head of its own."""
    config = small_config(**LLAMA, num_layers=1)
    qkv, projection, up, down, head = 24 * (40 + 20 + 20), 40 * 24, 24 * 80, 40 * 24, 24 * VOCAB
    assert parameter_count(config, VOCAB) == VOCAB * 24 + 24 + qkv + projection + 24 + up + down + 24 + head
    scores_and_mixture = 2 * 40 * 12 + 2 * 40 * 12  # per token, over the whole square of 12 tokens
    forward_per_token = 2 * (qkv + projection + up + down + head) + scores_and_mixture // 2
    assert model_flops(config, VOCAB, sample_count=5) == 3 * 5 * 12 * forward_per_token
    assert hardware_flops(config, VOCAB, sample_count=5, micro_batch_size=1) == 3 * 5 * 12 * (forward_per_token + scores_and_mixture // 2)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("recomputed", list(RECOMPUTED))
def test_hardware_flops_are_the_matrix_products_that_run_and_the_last_of_each_recomputed_chunk(architecture: str, recomputed: str) -> None:
    model = small_gpt(num_layers=3, hidden_dropout=0.1, **ARCHITECTURES[architecture], **RECOMPUTED[recomputed])
    config = model.config
    # A recomputation ends before the product whose result backward does not need. The formula counts it, as its source does.
    left_out = len(recomputed_chunks(config)) * 2 * 3 * config.seq_length * config.ffn_hidden_size * config.hidden_size
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*sample_batch(samples=3), first_sample=0).sum().backward()
    assert counter.get_total_flops() + left_out == hardware_flops(config, VOCAB, sample_count=3, micro_batch_size=3)


@pytest.mark.parametrize("untied", [False, True])
def test_a_head_in_chunks_makes_four_products_and_requires_three(untied: bool) -> None:
    model = small_gpt(loss_chunk_tokens=10, untie_embeddings_and_output_weights=untied)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*sample_batch(samples=3), first_sample=0).sum().backward()
    whole, head = small_config(untie_embeddings_and_output_weights=untied), 2 * 24 * VOCAB * 3 * 12
    assert counter.get_total_flops() == hardware_flops(model.config, VOCAB, sample_count=3, micro_batch_size=3)
    assert counter.get_total_flops() == hardware_flops(whole, VOCAB, sample_count=3, micro_batch_size=3) + head
    assert model_flops(model.config, VOCAB, 3) == model_flops(whole, VOCAB, 3)


def test_the_logits_of_a_micro_batch_that_fits_a_chunk_are_not_recomputed() -> None:
    config = small_config(loss_chunk_tokens=24)  # two samples of 12 tokens
    one, three = (hardware_flops(config, VOCAB, 6, micro_batch_size=samples) for samples in (2, 3))
    assert three - one == 2 * 24 * VOCAB * 6 * 12


def test_model_flops_leave_out_half_of_the_attention_square_and_every_recomputation() -> None:
    config = small_config()
    heads_width = config.num_attention_heads * config.kv_channels
    square = 3 * config.num_layers * 4 * config.seq_length**2 * heads_width
    assert hardware_flops(config, VOCAB, 5, micro_batch_size=1) - model_flops(config, VOCAB, 5) == 5 * square // 2
    assert model_flops(small_config(recompute_granularity="full"), VOCAB, 5) == model_flops(config, VOCAB, 5)


def test_recomputed_attention_counts_its_square_once_more() -> None:
    config, selective = small_config(), small_config(recompute_granularity="selective")
    square = 4 * config.num_layers * config.seq_length**2 * config.num_attention_heads * config.kv_channels
    assert hardware_flops(selective, VOCAB, 5, micro_batch_size=1) - hardware_flops(config, VOCAB, 5, micro_batch_size=1) == 5 * square
    assert model_flops(selective, VOCAB, 5) == model_flops(config, VOCAB, 5)


def test_flops_per_token_are_those_counted_by_hand() -> None:
    """GPT-2 small at 1024 tokens, forward, per token: two operations for each weight of a matrix, and the scores.

    attention 2 x 768 x (3 x 768) + 2 x 768 x 768   =   4 718 592
    MLP       2 x (2 x 768 x 3072)                  =   9 437 184
    scores    2 x 2 x 1024 x 768, whole square      =   3 145 728
    a block                                             17 301 504    with half of the square 15 728 640
    12 blocks                                          207 618 048                           188 743 680
    head      2 x 768 x 50304                       =  77 266 944
    """
    plain, recomputed = (gpt_config(layers=12, hidden=768, heads=12, length=1024, recompute=again) for again in (False, True))
    per_sample = 1024
    assert model_flops(plain, 50304, 1) == per_sample * 3 * (188_743_680 + 77_266_944)
    assert hardware_flops(plain, 50304, 1, micro_batch_size=1) == per_sample * 3 * (207_618_048 + 77_266_944)
    assert hardware_flops(recomputed, 50304, 1, micro_batch_size=1) == per_sample * (4 * 207_618_048 + 3 * 77_266_944)
    assert model_flops(recomputed, 50304, 1) == model_flops(plain, 50304, 1)


@pytest.mark.parametrize(("seconds", "published_tflops"), [(9.9559, 7.65), (3.6806, 20.70)])
def test_hardware_flops_give_the_published_throughput_of_the_zeropp_tutorial(seconds: float, published_tflops: float) -> None:
    """18 billion parameters on 64 V100: iteration times and TFLOPs per GPU as the DeepSpeed ZeRO++ tutorial shows them."""
    config = gpt_config(layers=40, hidden=6144, heads=32, length=512, recompute=True)
    assert round(hardware_flops(config, 50304, sample_count=64, micro_batch_size=1) / 64 / seconds / 1e12, 2) == published_tflops


def test_logits_are_computed_again_where_a_rank_has_more_tokens_of_a_micro_batch_than_a_chunk() -> None:
    config = small_config(loss_chunk_tokens=6)  # 12 tokens in a sample
    cases = {(1, 1): True, (1, 2): False, (2, 2): True, (2, 4): False}
    assert {(samples, ranks): recomputes_logits(config, samples, ranks) for samples, ranks in cases} == cases
