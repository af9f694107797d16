"""Compares the estimate of activations with the most that exists at once in forward and backward of a whole model, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.context_ranks import run_ladders
from harness.live_bytes import LiveBytes
from harness.small_gpt import LLAMA, small_config
from torch import nn

from megatron_zpp.comm.links import Ladder
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.activations import activation_need
from megatron_zpp.model.block_memory import AttentionNeed, RankShare
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.tensor_parallel.context import TensorParallel

pytestmark = pytest.mark.virtual

# Few channels and many tokens, so that weights and their gradients, which are not activations, are small beside them.
SHAPE: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 128, "kv_channels": 8, "num_attention_heads": 4}
SHAPE |= {"seq_length": 512, "max_position_embeddings": 512, "loss_chunk_tokens": 0}
SAMPLES, VOCAB = 2, 16
MOST = 1.15
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "dropout": {"hidden_dropout": 0.1},
    "squared ReLU": {"squared_relu": True},
    "Llama 3": LLAMA,
    "Qwen3, 1 key head": LLAMA | {"qk_layernorm": True, "num_query_groups": 1},
    "scores": {"attention_dropout": 0.1},
    "scores without dropout": {"attention_backend": "unfused"},
    "wide heads": {"kv_channels": 48},
    "wide heads, 1 key head": {"kv_channels": 48, "num_query_groups": 1},
}
KINDS: dict[str, dict[str, Any]] = {
    "kept": {},
    "full": {"recompute_granularity": "full", "recompute_num_layers": 1},
    "chunks": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "first": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "first two": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective"},
}
# Context ranks, tensor ranks, whether these divide tokens.
RANKS = {"C = 2": (2, 1, False), "C = 4": (4, 1, False), "C = T = 2": (2, 2, False), "C = T = 2, own tokens": (2, 2, True)}
ALONE = {"1 rank": (1, 1, False), "T = 2": (1, 2, False), "T = 2, own tokens": (1, 2, True)}
CASES = [
    ("GPT-2", "kept", "C = 2", torch.float32),
    ("GPT-2", "full", "C = 4", torch.bfloat16),
    ("GPT-2", "selective", "C = T = 2, own tokens", torch.float32),
    ("dropout", "full", "C = T = 2", torch.float32),
    ("dropout", "chunks", "C = 2", torch.bfloat16),
    ("squared ReLU", "full", "C = 2", torch.float32),
    ("squared ReLU", "kept", "C = T = 2, own tokens", torch.bfloat16),
    ("Llama 3", "kept", "C = T = 2", torch.bfloat16),
    ("Llama 3", "full", "C = 4", torch.float32),
    ("Llama 3", "selective", "C = 4", torch.bfloat16),
    ("Llama 3", "chunks", "C = T = 2, own tokens", torch.float32),
    ("Qwen3, 1 key head", "kept", "C = 4", torch.bfloat16),
    ("Qwen3, 1 key head", "full", "C = T = 2", torch.float32),
    ("scores", "full", "C = 2", torch.float32),
    ("scores", "selective", "C = T = 2", torch.bfloat16),
    ("scores", "first two", "C = 4", torch.float32),
    ("scores without dropout", "kept", "1 rank", torch.float32),
    ("scores without dropout", "full", "T = 2", torch.bfloat16),
    ("scores without dropout", "selective", "C = 2", torch.float32),
    ("wide heads", "kept", "C = 2", torch.float32),
    ("wide heads", "full", "C = 2", torch.bfloat16),
    ("wide heads, 1 key head", "full", "C = 4", torch.float32),
    ("GPT-2", "full", "1 rank", torch.float32),
    ("GPT-2", "first", "1 rank", torch.bfloat16),
    ("Llama 3", "first two", "1 rank", torch.float32),
    ("Llama 3", "kept", "1 rank", torch.bfloat16),
    ("Llama 3", "full", "T = 2", torch.float32),
    ("GPT-2", "full", "T = 2, own tokens", torch.bfloat16),
]


def peak_bytes(config: ModelConfig, dtype: torch.dtype, grid: Grid, *, sequence_parallel: bool) -> int:
    """The most on any rank. The gradient of a weight is freed when it has been made, as the engine does."""
    tokens = torch.randint(VOCAB, (SAMPLES, config.seq_length // grid.context_ranks), generator=torch.Generator().manual_seed(3))

    def on_rank(ladder: Ladder) -> int:
        tensor = None if ladder.tensor_link is None else TensorParallel(ladder.tensor_link, sequence_parallel)
        model = materialize(GPT(config, VOCAB, 7, dtype, tensor, ladder.context_link))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_free)
        with LiveBytes() as live:
            model(tokens, tokens, first_sample=0).sum().backward()
        return live.peak

    return max(run_ladders(grid, on_rank))


def _free(parameter: torch.Tensor) -> None:
    parameter.grad = None


def largest_gradient(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the gradient of the largest weight, which is planned with the weights."""
    with torch.device("meta"):
        return max(weight.nbytes for weight in GPT(config, VOCAB, 7, dtype).parameters() if isinstance(weight, nn.Parameter))


@pytest.mark.parametrize(("model", "kind", "ranks", "dtype"), CASES, ids=lambda part: str(part))
def test_the_estimate_is_never_below_the_peak_and_at_most_15_percent_above_it(
    model: str, kind: str, ranks: str, dtype: torch.dtype
) -> None:
    config = small_config(**SHAPE | MODELS[model] | KINDS[kind])
    context_ranks, tensor_ranks, sequence_parallel = (RANKS | ALONE)[ranks]
    grid = Grid.of_nodes(1, context_ranks * tensor_ranks, tensor_ranks, context_ranks)
    share = RankShare(SAMPLES, dtype.itemsize, tensor_ranks, sequence_parallel, context_ranks)
    keeps_scores = config.attention_dropout > 0 or config.attention_backend == "unfused"
    estimated = max(activation_need(config, VOCAB, share, attention=AttentionNeed(keeps_scores)))
    peak = peak_bytes(config, dtype, grid, sequence_parallel=sequence_parallel)
    assert peak - largest_gradient(config, dtype) <= estimated <= MOST * peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_scores_are_few_the_estimate_holds_the_copies_that_their_kernel_keeps(dtype: torch.dtype) -> None:
    config = small_config(**SHAPE | MODELS["scores"] | {"seq_length": 64})
    estimated = max(
        activation_need(config, VOCAB, RankShare(SAMPLES, dtype.itemsize, context_ranks=2), attention=AttentionNeed(keeps_scores=True))
    )
    peak = peak_bytes(config, dtype, Grid.of_nodes(1, 2, 1, 2), sequence_parallel=False)
    assert peak - largest_gradient(config, dtype) <= estimated <= MOST * peak


@pytest.mark.parametrize(("context_ranks", "tensor_ranks"), [(4, 1), (1, 4)])
def test_where_a_rank_has_one_sample_and_one_head_the_estimate_holds_the_causal_mask(
    context_ranks: int, tensor_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SAMPLES", 1)
    config = small_config(**SHAPE | MODELS["scores"] | KINDS["full"])
    share = RankShare(1, torch.bfloat16.itemsize, tensor_ranks, context_ranks=context_ranks)
    estimated = max(activation_need(config, VOCAB, share, attention=AttentionNeed(keeps_scores=True)))
    grid = Grid.of_nodes(1, 4, tensor_ranks, context_ranks)
    peak = peak_bytes(config, torch.bfloat16, grid, sequence_parallel=False)
    assert peak - largest_gradient(config, torch.bfloat16) <= estimated <= MOST * peak
