"""Compares the estimate of activations with what autograd really keeps."""

from __future__ import annotations

import pytest
import torch
from harness.small_gpt import ARCHITECTURES, VOCAB, small_config, small_gpt
from torch import Tensor

from megatron_zpp.model.activations import AttentionNeed, activation_bytes

SHAPE = {"num_layers": 6, "hidden_size": 96, "ffn_hidden_size": 384, "kv_channels": 24, "num_attention_heads": 4}
SHAPE |= {"seq_length": 64, "max_position_embeddings": 64}
SAMPLES = 3


def estimated_bytes(dtype: torch.dtype, **changes: object) -> int:
    config = small_config(**(SHAPE | changes))
    return activation_bytes(config, VOCAB, SAMPLES, dtype.itemsize, attention=AttentionNeed(keeps_scores=config.attention_dropout > 0))


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
@pytest.mark.parametrize(("hidden_dropout", "attention_dropout"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.1)])
def test_without_recomputation_the_estimate_is_what_autograd_keeps_within_a_twentieth_less_and_a_third_more(
    dtype: torch.dtype, hidden_dropout: float, attention_dropout: float
) -> None:
    dropouts = {"hidden_dropout": hidden_dropout, "attention_dropout": attention_dropout}
    kept = kept_bytes(dtype, **dropouts)
    assert 0.95 * kept <= estimated_bytes(dtype, **dropouts) <= 4 / 3 * kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_estimate_holds_what_autograd_keeps_of_every_architecture(dtype: torch.dtype, architecture: str) -> None:
    changes = {**ARCHITECTURES[architecture], "num_attention_heads": 4}
    kept = kept_bytes(dtype, **changes)
    assert 0.95 * kept <= estimated_bytes(dtype, **changes) <= 4 / 3 * kept


def test_heads_that_are_repeated_for_their_queries_count_as_often_as_queries() -> None:
    config = small_config(num_attention_heads=6, num_query_groups=2)
    shared, repeated = (
        activation_bytes(config, VOCAB, 1, 4, attention=AttentionNeed(keeps_scores=False, repeats_heads=repeats))
        for repeats in (False, True)
    )
    copies = config.num_layers + 1  # of a block: in forward, and the gradients of one
    assert repeated - shared == copies * config.seq_length * 4 * 2 * (6 - 2) * config.kv_channels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_dropout_keeps_nothing(dtype: torch.dtype) -> None:
    assert kept_bytes(dtype, hidden_dropout=0.1) == kept_bytes(dtype)
    assert estimated_bytes(dtype, hidden_dropout=0.1) == estimated_bytes(dtype)


HIDDEN_BYTES = SAMPLES * SHAPE["seq_length"] * SHAPE["hidden_size"] * 4


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_recomputed_blocks_keep_one_hidden_state_per_chunk_and_the_estimate_holds_them_and_one_chunk(chunk: int) -> None:
    whole = {"recompute_granularity": "full", "recompute_num_layers": 6}
    chunks = {"recompute_granularity": "full", "recompute_num_layers": chunk}
    assert kept_bytes(torch.float32, **chunks) - kept_bytes(torch.float32, **whole) == (-(-6 // chunk) - 1) * HIDDEN_BYTES
    twice_the_depth = estimated_bytes(torch.float32, num_layers=12, **chunks) - estimated_bytes(torch.float32, **chunks)
    assert twice_the_depth == (-(-12 // chunk) - -(-6 // chunk)) * HIDDEN_BYTES
    one_more_kept = estimated_bytes(torch.float32, num_layers=7) - estimated_bytes(torch.float32)
    assert kept_bytes(torch.float32, **chunks) + chunk * one_more_kept <= estimated_bytes(torch.float32, **chunks)


@pytest.mark.parametrize("count", [1, 4])
def test_of_blocks_that_are_not_recomputed_the_estimate_holds_all_that_is_kept(count: int) -> None:
    first = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": count}
    kept = kept_bytes(torch.float32, **first)
    assert kept == kept_bytes(torch.float32) - count * (kept_bytes(torch.float32, num_layers=7) - kept_bytes(torch.float32) - HIDDEN_BYTES)
    one_more_kept = estimated_bytes(torch.float32, num_layers=7) - estimated_bytes(torch.float32)
    assert kept + one_more_kept <= estimated_bytes(torch.float32, **first) < estimated_bytes(torch.float32) + one_more_kept


def test_recomputed_attention_keeps_no_scores_and_its_estimate_holds_what_is_kept_and_the_scores_of_one_block() -> None:
    dropouts = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    kept, selective = (kept_bytes(torch.float32, recompute_granularity=kind, **dropouts) for kind in (None, "selective"))
    scores = 3 * 4 * SHAPE["num_attention_heads"] * SAMPLES * SHAPE["seq_length"] ** 2  # after softmax, after dropout, what was dropped
    assert kept - selective > 0.6 * 6 * scores  # torch's kernel drops on a mask of one byte or of the values' width
    assert selective + scores <= estimated_bytes(torch.float32, recompute_granularity="selective", **dropouts) < kept


def test_activations_grow_with_the_micro_batch() -> None:
    config = small_config(**SHAPE)
    one, two = (activation_bytes(config, VOCAB, samples, 2, attention=AttentionNeed(keeps_scores=False)) for samples in (1, 2))
    assert one < two <= 2 * one
