"""What autograd keeps of a forward: what recomputation, dropout and the loss in chunks change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.live_bytes import LiveBytes
from harness.planned_rank import peak_of_model, planned_activations
from harness.small_gpt import VOCAB, small_config, small_gpt
from torch import Tensor, nn

from megatron_zpp.model.loss import head_loss
from megatron_zpp.ops.device_kind import standing_for
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.training.plan.live_memory import Workspace, most_bytes

SHAPE: dict[str, Any] = {"num_layers": 6, "hidden_size": 96, "ffn_hidden_size": 384, "kv_channels": 24, "num_attention_heads": 4}
SHAPE |= {"seq_length": 64, "max_position_embeddings": 64}
SAMPLES = 3


def kept_bytes(dtype: torch.dtype, **changes: object) -> int:
    """Bytes of the storages that autograd holds after a forward, without weights."""
    model = small_gpt(dtype=dtype, **(SHAPE | changes))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(VOCAB, (SAMPLES, SHAPE["seq_length"]), generator=torch.Generator().manual_seed(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, tokens, first_sample=0)
    total = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)
    loss.sum().backward()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_dropout_keeps_nothing(dtype: torch.dtype) -> None:
    assert kept_bytes(dtype, hidden_dropout=0.1) == kept_bytes(dtype)


HIDDEN_BYTES = SAMPLES * SHAPE["seq_length"] * SHAPE["hidden_size"] * 4


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_recomputed_blocks_keep_one_hidden_state_per_chunk(chunk: int) -> None:
    whole = {"recompute_granularity": "full", "recompute_num_layers": 6}
    chunks = {"recompute_granularity": "full", "recompute_num_layers": chunk}
    assert kept_bytes(torch.float32, **chunks) - kept_bytes(torch.float32, **whole) == (-(-6 // chunk) - 1) * HIDDEN_BYTES


@pytest.mark.parametrize("count", [1, 4])
def test_blocks_that_are_not_recomputed_keep_all_that_they_keep_alone(count: int) -> None:
    first = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": count}
    of_block = kept_bytes(torch.float32, num_layers=7) - kept_bytes(torch.float32)
    assert kept_bytes(torch.float32, **first) == kept_bytes(torch.float32) - count * (of_block - HIDDEN_BYTES)


def test_recomputed_attention_keeps_no_scores() -> None:
    dropouts = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    kept, selective = (kept_bytes(torch.float32, recompute_granularity=kind, **dropouts) for kind in (None, "selective"))
    scores = 3 * 4 * SHAPE["num_attention_heads"] * SAMPLES * SHAPE["seq_length"] ** 2  # after softmax, after dropout, what was dropped
    assert kept - selective > 0.6 * 6 * scores  # torch's kernel drops on a mask of one byte or of the values' width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("untied", [False, True])
def test_a_loss_in_chunks_keeps_two_numbers_per_token_in_place_of_its_logits(dtype: torch.dtype, untied: bool) -> None:
    changes = {"untie_embeddings_and_output_weights": untied}
    tokens = SAMPLES * SHAPE["seq_length"]
    whole, chunks = (kept_bytes(dtype, loss_chunk_tokens=chunk, **changes) for chunk in (0, 50))
    assert whole - chunks == tokens * VOCAB * dtype.itemsize - 2 * 4 * tokens


# ---- plans


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocabulary", "hidden_size", "chunk"), [(8192, 64, 0), (8192, 64, 64), (8192, 64, 256), (512, 256, 64)], ids=str)
def test_the_planned_peak_of_head_and_loss_is_the_measured_one(vocabulary: int, hidden_size: int, chunk: int, dtype: torch.dtype) -> None:
    def values(device: str) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = (torch.ones(rows, hidden_size, dtype=dtype, device=device) for rows in (1024, vocabulary))
        return hidden.requires_grad_(), nn.Parameter(weight), torch.zeros(1024, dtype=torch.int64, device=device)

    hidden, weight, labels = values("cpu")
    with LiveBytes() as measured:
        head_loss(hidden, weight, labels, chunk).sum().backward()
    hidden, weight, labels = values("meta")
    with standing_for("cpu"):
        planned = most_bytes(lambda: head_loss(hidden, weight, labels, chunk).sum().backward(), Workspace(is_on_gpu=False))
    assert planned == pytest.approx(measured.peak, rel=0.01)


def planned_bytes(vocabulary: int = VOCAB, samples: int = 1, *, is_on_gpu: bool = True, **changes: Any) -> int:
    return peak_of_model(
        planned_activations(small_config(**changes), vocabulary, samples, torch.bfloat16, Grid.of_nodes(1, 1), is_on_gpu=is_on_gpu)
    )


@pytest.mark.parametrize("tokens_of_chunk", [256, 1024])
@pytest.mark.parametrize("length", [8192, 16384])
def test_beside_the_heads_gradient_a_plan_grows_with_the_vocabulary_by_the_logits_of_a_chunk_alone(
    tokens_of_chunk: int, length: int
) -> None:
    changes: dict[str, Any] = {"seq_length": length, "max_position_embeddings": length, "loss_chunk_tokens": tokens_of_chunk}
    small, large = (planned_bytes(vocabulary, **changes) for vocabulary in (100_000, 200_000))
    logits, gradient = 100_000 * 2 * tokens_of_chunk, 100_000 * 2 * changes.get("hidden_size", 24)
    assert logits <= large - small <= 2 * logits + 3 * gradient


def test_activations_grow_with_the_micro_batch() -> None:
    one, two = (planned_bytes(samples=samples, **SHAPE) for samples in (1, 2))
    assert one < two <= 2 * one


def test_where_heads_are_repeated_for_their_queries_a_plan_counts_them_as_often_as_queries() -> None:
    """Efficient attention, which a GPU takes for fp32, has a key head for each query; flash shares them."""

    def of_block(dtype: torch.dtype, groups: int) -> int:
        shape: dict[str, Any] = {"num_attention_heads": 6, "num_query_groups": groups, "seq_length": 512, "max_position_embeddings": 512}
        configs = [small_config(num_layers=layers, **shape) for layers in (4, 5)]
        fewer, more = (
            peak_of_model(planned_activations(config, VOCAB, 1, dtype, Grid.of_nodes(1, 1), is_on_gpu=True)) for config in configs
        )
        return more - fewer

    assert of_block(torch.float32, 2) == of_block(torch.float32, 6)
    assert of_block(torch.bfloat16, 2) < of_block(torch.bfloat16, 6)
