"""The estimate of activations against what autograd really keeps."""

from __future__ import annotations

import pytest
import torch
from small_gpt import VOCAB, small_config, small_gpt
from torch import Tensor

from megatron_zpp.model.activations import activation_bytes

SHAPE = {"num_layers": 6, "hidden_size": 96, "ffn_hidden_size": 384, "kv_channels": 24, "num_attention_heads": 4}
SHAPE |= {"seq_length": 64, "max_position_embeddings": 64}
SAMPLES = 3


def estimated_bytes(dtype: torch.dtype, **changes: object) -> int:
    config = small_config(**SHAPE, **changes)
    return activation_bytes(config, VOCAB, SAMPLES, dtype.itemsize, keeps_attention_scores=config.attention_dropout > 0)


def kept_bytes(dtype: torch.dtype, **changes: object) -> int:
    """Bytes of the storages that autograd holds after a forward, weights left out."""
    model = small_gpt(dtype=dtype, **SHAPE, **changes)
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


def test_with_recomputation_a_block_adds_one_hidden_state_and_the_estimate_holds_what_autograd_keeps() -> None:
    estimates = [
        activation_bytes(
            small_config(**{**SHAPE, "num_layers": layers}, recompute_granularity="full"),
            VOCAB,
            SAMPLES,
            4,
            keeps_attention_scores=False,
        )
        for layers in (6, 7)
    ]
    assert estimates[1] - estimates[0] == SAMPLES * SHAPE["seq_length"] * SHAPE["hidden_size"] * 4
    assert kept_bytes(torch.float32, recompute_granularity="full") <= estimates[0] < estimated_bytes(torch.float32) / 2


def test_activations_grow_with_the_micro_batch() -> None:
    config = small_config(**SHAPE)
    one, two = (activation_bytes(config, VOCAB, samples, 2, keeps_attention_scores=False) for samples in (1, 2))
    assert one < two <= 2 * one
