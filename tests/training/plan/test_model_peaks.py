"""The planned peak of a model alone against the most that exists at once in its forward and backward, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.context_ranks import run_ladders
from harness.live_bytes import LiveBytes
from harness.planned_rank import peak_of_model, planned_activations
from harness.small_gpt import ARCHITECTURES, LLAMA, small_config

from megatron_zpp.comm.links import Links
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.tensor_parallel.context import TensorParallel

pytestmark = pytest.mark.virtual

# Few channels and many tokens, so that weights and their gradients, which are not activations, are small beside them.
SHAPE: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 128, "kv_channels": 8, "num_attention_heads": 4}
SHAPE |= {"seq_length": 256, "max_position_embeddings": 256, "loss_chunk_tokens": 0}
SAMPLES, VOCAB = 2, 16
WITHIN = 0.01  # numbers that a rank has beside its tensors
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
    ("Qwen3, 1 key head", "kept", "T = 2", torch.float32),
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


def peak_bytes(config: ModelConfig, dtype: torch.dtype, grid: Grid, *, sequence_parallel: bool, vocabulary: int = VOCAB) -> int:
    """The most on any rank. The gradient of a weight is freed when it has been made, as the engine does."""
    tokens = torch.randint(VOCAB, (SAMPLES, config.seq_length // grid.context_ranks), generator=torch.Generator().manual_seed(3))

    def on_rank(links: Links) -> int:
        tensor = None if links.tensor_link is None else TensorParallel(links.tensor_link, sequence_parallel)
        model = materialize(GPT(config, vocabulary, 7, dtype, tensor, links.context_link))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_free)
        with LiveBytes() as live:
            model(tokens, tokens, first_sample=0).sum().backward()
        return live.peak

    return max(run_ladders(grid, on_rank))


def _free(parameter: torch.Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize(("model", "kind", "ranks", "dtype"), CASES, ids=lambda part: str(part))
def test_the_planned_peak_of_forward_and_backward_is_the_measured_one_within_a_hundredth(
    model: str, kind: str, ranks: str, dtype: torch.dtype
) -> None:
    config = small_config(**SHAPE | MODELS[model] | KINDS[kind])
    context_ranks, tensor_ranks, sequence_parallel = (RANKS | ALONE)[ranks]
    grid = Grid.of_nodes(1, context_ranks * tensor_ranks, tensor_ranks, context_ranks)
    planned = peak_of_model(planned_activations(config, VOCAB, SAMPLES, dtype, grid, sequence_parallel=sequence_parallel))
    assert planned == pytest.approx(peak_bytes(config, dtype, grid, sequence_parallel=sequence_parallel), rel=WITHIN)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_planned_peak_of_every_architecture_is_the_measured_one(architecture: str) -> None:
    dtype = (torch.float32, torch.bfloat16)[list(ARCHITECTURES).index(architecture) % 2]
    changes = {**ARCHITECTURES[architecture], "num_attention_heads": 4}
    config, grid = small_config(**SHAPE | changes | {"seq_length": 128, "num_layers": 2}), Grid.of_nodes(1, 1)
    planned = peak_of_model(planned_activations(config, VOCAB, SAMPLES, dtype, grid))
    assert planned == pytest.approx(peak_bytes(config, dtype, grid, sequence_parallel=False), rel=WITHIN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes", [{"seq_length": 64}, {"loss_chunk_tokens": 50}, {"loss_chunk_tokens": 50, "hidden_dropout": 0.1}], ids=str
)
def test_the_planned_peak_has_few_scores_and_chunks_of_the_loss(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    config = small_config(**SHAPE | MODELS["scores"] | {"seq_length": 128} | changes)
    grid = Grid.of_nodes(1, 2, 1, 2)
    planned = peak_of_model(planned_activations(config, 512, SAMPLES, dtype, grid))
    assert planned == pytest.approx(peak_bytes(config, dtype, grid, sequence_parallel=False, vocabulary=512), rel=WITHIN)


@pytest.mark.parametrize(("context_ranks", "tensor_ranks", "sequence_parallel"), [(4, 1, False), (1, 4, False), (1, 8, True)])
def test_the_planned_peak_of_a_rank_that_has_one_sample_and_one_head_is_the_measured_one(
    context_ranks: int, tensor_ranks: int, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SAMPLES", 1)
    config = small_config(**SHAPE | MODELS["scores"] | KINDS["full"] | {"num_attention_heads": context_ranks * tensor_ranks})
    grid = Grid.of_nodes(1, context_ranks * tensor_ranks, tensor_ranks, context_ranks)
    planned = peak_of_model(planned_activations(config, VOCAB, 1, torch.bfloat16, grid, sequence_parallel=sequence_parallel))
    assert planned == pytest.approx(peak_bytes(config, torch.bfloat16, grid, sequence_parallel=sequence_parallel), rel=WITHIN)
