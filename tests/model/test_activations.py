"""Compares the estimate of activations with what autograd really keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.live_bytes import LiveBytes
from harness.small_gpt import ARCHITECTURES, VOCAB, small_config, small_gpt
from torch import Tensor, nn

from megatron_zpp.model.activations import activation_need, head_bytes
from megatron_zpp.model.block_memory import AttentionNeed, RankShare
from megatron_zpp.model.head_loss import head_loss

SHAPE = {"num_layers": 6, "hidden_size": 96, "ffn_hidden_size": 384, "kv_channels": 24, "num_attention_heads": 4}
SHAPE |= {"seq_length": 64, "max_position_embeddings": 64}
SAMPLES = 3


def estimated_bytes(dtype: torch.dtype, **changes: object) -> int:
    config = small_config(**(SHAPE | changes))
    return max(
        activation_need(
            config, VOCAB, RankShare(SAMPLES, dtype.itemsize), attention=AttentionNeed(keeps_scores=config.attention_dropout > 0)
        )
    )


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
        max(activation_need(config, VOCAB, RankShare(1, 4), attention=AttentionNeed(keeps_scores=False, repeats_heads=repeats)))
        for repeats in (False, True)
    )
    copies = config.num_layers + 1  # of a block: in forward, and the gradients of one
    assert repeated - shared == copies * config.seq_length * 4 * 2 * (6 - 2) * config.kv_channels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_dropout_keeps_nothing_and_has_at_most_one_gradient_of_its_own(dtype: torch.dtype) -> None:
    assert kept_bytes(dtype, hidden_dropout=0.1) == kept_bytes(dtype)
    gradient = SAMPLES * SHAPE["seq_length"] * SHAPE["hidden_size"] * dtype.itemsize
    assert 0 <= estimated_bytes(dtype, hidden_dropout=0.1) - estimated_bytes(dtype) <= gradient


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
    assert kept < estimated_bytes(torch.float32, **first) < estimated_bytes(torch.float32)  # peaks: test_activation_peaks.py


def test_recomputed_attention_keeps_no_scores_and_its_estimate_holds_what_is_kept() -> None:
    dropouts = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    kept, selective = (kept_bytes(torch.float32, recompute_granularity=kind, **dropouts) for kind in (None, "selective"))
    scores = 3 * 4 * SHAPE["num_attention_heads"] * SAMPLES * SHAPE["seq_length"] ** 2  # after softmax, after dropout, what was dropped
    assert kept - selective > 0.6 * 6 * scores  # torch's kernel drops on a mask of one byte or of the values' width
    assert selective <= estimated_bytes(torch.float32, recompute_granularity="selective", **dropouts) < kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("untied", [False, True])
def test_a_loss_in_chunks_keeps_two_numbers_per_token_in_place_of_its_logits_and_the_estimate_holds_what_is_kept(
    dtype: torch.dtype, untied: bool
) -> None:
    changes = {"untie_embeddings_and_output_weights": untied}
    tokens = SAMPLES * SHAPE["seq_length"]
    whole, chunks = (kept_bytes(dtype, loss_chunk_tokens=chunk, **changes) for chunk in (0, 50))
    assert whole - chunks == tokens * VOCAB * dtype.itemsize - 2 * 4 * tokens
    assert 0.95 * chunks <= estimated_bytes(dtype, loss_chunk_tokens=50, **changes)


@pytest.mark.parametrize("tokens_of_chunk", [256, 1024])
def test_beside_the_heads_gradient_the_estimate_grows_with_the_vocabulary_by_the_logits_of_a_chunk_alone(tokens_of_chunk: int) -> None:
    config = small_config(seq_length=8192, max_position_embeddings=8192, loss_chunk_tokens=tokens_of_chunk)
    attention = AttentionNeed(keeps_scores=False)
    small, large = (max(activation_need(config, vocabulary, RankShare(1, 2), attention=attention)) for vocabulary in (100_000, 200_000))
    assert large - small == 100_000 * 2 * (tokens_of_chunk + config.hidden_size)  # fp32 values have a limit of their own
    longer = small_config(seq_length=16384, max_position_embeddings=16384, loss_chunk_tokens=tokens_of_chunk)
    small, large = (max(activation_need(longer, vocabulary, RankShare(1, 2), attention=attention)) for vocabulary in (100_000, 200_000))
    assert large - small == 100_000 * 2 * (tokens_of_chunk + config.hidden_size)


def test_of_whole_logits_the_estimate_holds_two_or_one_beside_the_gradient_of_a_head_that_is_larger() -> None:
    wide = small_config(hidden_size=1024, loss_chunk_tokens=0)
    attention = AttentionNeed(keeps_scores=False)
    small, large = (max(activation_need(wide, vocabulary, RankShare(1, 2), attention=attention)) for vocabulary in (10**6, 2 * 10**6))
    assert large - small == 10**6 * 2 * (wide.seq_length + wide.hidden_size)
    narrow = small_config(seq_length=8192, max_position_embeddings=8192, loss_chunk_tokens=0)
    small, large = (max(activation_need(narrow, vocabulary, RankShare(1, 2), attention=attention)) for vocabulary in (10**6, 2 * 10**6))
    assert large - small == 10**6 * 2 * 2 * narrow.seq_length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [0, 64, 256])
def test_the_estimate_of_head_and_loss_is_their_peak_within_a_twentieth(dtype: torch.dtype, chunk: int) -> None:
    estimate, peak = estimate_and_peak(8192, 64, chunk, dtype)
    assert estimate == pytest.approx(peak, rel=0.05)


def test_the_estimate_has_the_fp32_sum_of_the_gradient_of_hidden_states_where_that_is_the_largest_tensor() -> None:
    estimate, peak = estimate_and_peak(512, 256, 64, torch.bfloat16)
    assert peak <= estimate <= 1.1 * peak


def estimate_and_peak(vocabulary: int, hidden_size: int, chunk: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of head and loss for 1024 tokens, with the hidden states."""
    tokens = 1024
    config = small_config(hidden_size=hidden_size, loss_chunk_tokens=chunk)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(rows, hidden_size, generator=generator).to(dtype).requires_grad_() for rows in (tokens, vocabulary))
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    with LiveBytes() as live:
        head_loss(hidden, nn.Parameter(weight.detach()), labels, chunk).sum().backward()
    return head_bytes(config, vocabulary, tokens, dtype.itemsize, fuses_loss=False), live.peak + hidden.nbytes


def test_activations_grow_with_the_micro_batch() -> None:
    config = small_config(**SHAPE)
    one, two = (
        max(activation_need(config, VOCAB, RankShare(samples, 2), attention=AttentionNeed(keeps_scores=False))) for samples in (1, 2)
    )
    assert one < two <= 2 * one


@pytest.mark.parametrize(("groups", "held", "times"), [(8, 2, 1), (2, 1, 2)])
def test_tensor_ranks_share_heads_feed_forward_and_vocabulary_and_have_whole_hidden_states(groups: int, held: int, times: int) -> None:
    """held: groups of keys and values on one rank of four. times: how often they are kept, twice where several queries share one."""
    need = AttentionNeed(keeps_scores=False)
    config = small_config(
        **(SHAPE | {"num_attention_heads": 8}), num_query_groups=groups, hidden_dropout=0.1, untie_embeddings_and_output_weights=True
    )
    deeper = replace(config, num_layers=config.num_layers + 1)
    alone, shared = (  # what one more block keeps
        max(activation_need(deeper, VOCAB, share, attention=need)) - max(activation_need(config, VOCAB, share, attention=need))
        for share in (RankShare(SAMPLES, 4, ranks) for ranks in (1, 4))
    )
    whole = 4 * (4 * config.hidden_size) + 2 * 2 * 4  # per token: fp32 values, statistics
    of_group = times * 4 * 2 * config.kv_channels
    tokens = SAMPLES * config.seq_length
    divided = alone - tokens * (whole + groups * of_group)
    assert shared == divided / 4 + tokens * (whole + held * of_group)
