"""Compares the estimate of activations with what autograd keeps on a rank that shares layers or samples, and with what exists at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.context_ranks import run_context_ranks
from harness.live_bytes import LiveBytes
from harness.small_gpt import LLAMA, small_config
from harness.tensor_ranks import run_tensor_ranks
from torch import Tensor

from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.activations import activation_need
from megatron_zpp.model.block_memory import AttentionNeed, BlockMemory, RankShare, bias_buffer_bytes, tensor_buffer_bytes
from megatron_zpp.model.context_traffic import DividedSamples
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.tensor_parallel.head_exchange import HeadExchange
from megatron_zpp.tensor_parallel.layers import ColumnLinear

pytestmark = pytest.mark.virtual

SHAPE: dict[str, Any] = {"num_layers": 6, "hidden_size": 96, "ffn_hidden_size": 384, "kv_channels": 24, "num_attention_heads": 4}
SHAPE |= {"seq_length": 64, "max_position_embeddings": 64}
SAMPLES, VOCAB = 3, 64
MODELS: dict[str, dict[str, Any]] = {"GPT-2": {}, "Llama 3": LLAMA | {"num_query_groups": 2}, "Qwen3": LLAMA | {"qk_layernorm": True}}

token_orders = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all tokens", "own tokens"])


def estimated_bytes(dtype: torch.dtype, ranks: int, *, sequence_parallel: bool, **changes: Any) -> int:
    need = AttentionNeed(keeps_scores=False)
    config = small_config(**(SHAPE | changes))
    return max(activation_need(config, VOCAB, RankShare(SAMPLES, dtype.itemsize, ranks, sequence_parallel), attention=need))


def kept_bytes(dtype: torch.dtype, ranks: int, *, sequence_parallel: bool, **changes: Any) -> int:
    """Bytes of the storages that autograd holds after a forward on the last rank, without weights."""
    tokens = torch.randint(VOCAB, (SAMPLES, SHAPE["seq_length"]), generator=torch.Generator().manual_seed(3))

    config = small_config(**(SHAPE | changes))
    return run_tensor_ranks(ranks, lambda link: _kept(config, dtype, tokens, TensorParallel(link, sequence_parallel)))[-1]


def _kept(
    config: ModelConfig, dtype: torch.dtype, tokens: Tensor, tensor: TensorParallel | None, context: ContextLink | None = None
) -> int:
    """Bytes of the storages that autograd holds after a forward, without weights."""
    model = materialize(GPT(config, VOCAB, 7, dtype, tensor, context))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, tokens, first_sample=0)
    total = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)
    loss.sum().backward()
    return total


@token_orders
@pytest.mark.parametrize(
    ("model", "ranks", "dtype"), [("GPT-2", 2, torch.float32), ("Llama 3", 4, torch.bfloat16), ("Qwen3", 2, torch.bfloat16)]
)
def test_the_estimate_holds_what_autograd_keeps_on_a_tensor_rank(
    model: str, ranks: int, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    kept = kept_bytes(dtype, ranks, sequence_parallel=sequence_parallel, **MODELS[model])
    estimated = estimated_bytes(dtype, ranks, sequence_parallel=sequence_parallel, **MODELS[model])
    assert 0.95 * kept <= estimated <= 4 / 3 * kept


@token_orders
def test_a_recomputed_chunk_keeps_the_hidden_states_that_a_rank_has(sequence_parallel: bool) -> None:
    hidden = SAMPLES * SHAPE["seq_length"] * SHAPE["hidden_size"] * 4 // (2 if sequence_parallel else 1)
    chunks, whole = ({"recompute_granularity": "full", "recompute_num_layers": count} for count in (1, 6))
    of_chunks, of_whole = (kept_bytes(torch.float32, 2, sequence_parallel=sequence_parallel, **kind) for kind in (chunks, whole))
    assert of_chunks - of_whole == 5 * hidden
    deeper, shallower = (
        estimated_bytes(torch.float32, 2, sequence_parallel=sequence_parallel, **(chunks | {"num_layers": layers})) for layers in (12, 6)
    )
    assert deeper - shallower == 6 * hidden


def test_with_sequence_parallelism_all_that_a_block_keeps_is_divided() -> None:
    whole, one_more = (estimated_bytes(torch.float32, 1, sequence_parallel=False, num_layers=layers) for layers in (6, 7))
    of_rank, one_more_of_rank = (estimated_bytes(torch.float32, 4, sequence_parallel=True, num_layers=layers) for layers in (6, 7))
    assert one_more_of_rank - of_rank == (one_more - whole) / 4


@token_orders
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_beside_what_one_rank_has_backward_of_a_layer_holds_the_estimate_of_what_crosses_the_link(
    ranks: int, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    config = small_config(**SHAPE)
    hidden_bytes = SAMPLES * config.seq_length * config.hidden_size * dtype.itemsize

    def on_rank(link: TensorLink) -> int:
        layer = ColumnLinear(config.hidden_size, 1, TensorParallel(link, sequence_parallel), bias=False, dtype=dtype)
        length = config.seq_length // ranks if sequence_parallel else config.seq_length
        hidden = torch.zeros(SAMPLES, length, config.hidden_size, dtype=dtype, requires_grad=True)
        output = layer(hidden)
        grad = torch.zeros_like(output)
        with LiveBytes() as live:
            torch.autograd.grad(output, hidden, grad)
        return live.peak

    estimated = tensor_buffer_bytes(config, RankShare(SAMPLES, dtype.itemsize, ranks, sequence_parallel), uses_streams=False)
    gradient = 0 if sequence_parallel else hidden_bytes  # without sequence parallelism it is one of a block's, as on one rank
    for peak in run_tensor_ranks(ranks, on_rank):
        assert peak == pytest.approx(estimated + gradient, rel=0.01)


@token_orders
def test_on_a_gpu_sums_of_forward_have_a_buffer_besides_that_of_backward(sequence_parallel: bool) -> None:
    config, share = small_config(**SHAPE), RankShare(SAMPLES, 2, 2, sequence_parallel)
    on_gpu, on_cpu = (BlockMemory(config, share, AttentionNeed(keeps_scores=False), is_on_gpu) for is_on_gpu in (True, False))
    assert on_gpu.lasting_buffers - on_cpu.lasting_buffers == SAMPLES * config.seq_length * config.hidden_size * 2


@pytest.mark.parametrize(("tokens", "width", "mebibytes"), [(8192, 1024, 64), (4096, 3072, 96), (8192, 3072, 132)])
def test_the_gradient_of_a_bias_needs_the_buffer_that_torch_takes_on_132_processors(
    tokens: int, width: int, mebibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_zpp.model.block_memory.PROCESSORS", 132)
    assert bias_buffer_bytes(tokens, width) == pytest.approx(mebibytes * 2**20, rel=0.02)  # seen with benchmarks/fake_gpus.py


def test_a_feed_forward_half_without_biases_needs_no_buffer_though_queries_of_the_same_width_have_one() -> None:
    config = small_config(**(SHAPE | {"ffn_hidden_size": 3 * SHAPE["hidden_size"], "add_qkv_bias": True}))
    share, attention = RankShare(SAMPLES, 2), AttentionNeed(keeps_scores=False)
    with_all, with_one = (
        BlockMemory(replace(config, disable_bias_linear=disable), share, attention, is_on_gpu=True).in_backward for disable in (False, True)
    )
    assert with_one < with_all


# ---- ranks that divide samples


def kept_of_divided(dtype: torch.dtype, ranks: int, **changes: Any) -> int:
    """The same as `kept_bytes` on the last of `ranks` ranks that divide the tokens of each sample; with one rank, it has them whole."""
    tokens = torch.randint(VOCAB, (SAMPLES, SHAPE["seq_length"] // ranks), generator=torch.Generator().manual_seed(3))
    return run_context_ranks(ranks, lambda link: _kept(small_config(**(SHAPE | changes)), dtype, tokens, None, link))[-1]


@pytest.mark.parametrize(
    ("model", "ranks", "dtype"),
    [("GPT-2", 2, torch.float32), ("Llama 3", 4, torch.bfloat16), ("Qwen3", 2, torch.bfloat16), ("Llama 3", 2, torch.float32)],
)
def test_the_estimate_holds_what_autograd_keeps_on_a_rank_that_has_a_part_of_each_sample(
    model: str, ranks: int, dtype: torch.dtype
) -> None:
    changes, need = MODELS[model], AttentionNeed(keeps_scores=False)
    config = small_config(**(SHAPE | changes))
    estimated = max(activation_need(config, VOCAB, RankShare(SAMPLES, dtype.itemsize, context_ranks=ranks), attention=need))
    assert 0.95 * kept_of_divided(dtype, ranks, **changes) <= estimated <= 4 / 3 * kept_of_divided(dtype, ranks, **changes)


@pytest.mark.parametrize("kind", [{}, {"recompute_granularity": "full", "recompute_num_layers": 1}], ids=["kept", "recomputed"])
def test_what_a_block_keeps_falls_with_the_ranks_that_divide_samples(kind: dict[str, Any]) -> None:
    of_block = {
        ranks: kept_of_divided(torch.float32, ranks, num_layers=3, **kind) - kept_of_divided(torch.float32, ranks, num_layers=2, **kind)
        for ranks in (2, 4)
    }
    assert of_block[2] == 2 * of_block[4] > 0


@pytest.mark.parametrize(("ranks", "groups"), [(2, 4), (4, 4), (4, 2)])
def test_an_exchange_holds_the_parts_that_a_rank_sends_and_those_that_it_gets(ranks: int, groups: int) -> None:
    config = small_config(**(SHAPE | {"num_query_groups": groups}))
    divided = DividedSamples(config, ranks)

    def on_rank(link: ContextLink) -> int:
        exchange = HeadExchange(link, groups, config.num_attention_heads // groups, config.kv_channels)
        own = torch.zeros(SAMPLES, divided.own.seq_length, config.qkv_width)
        with LiveBytes() as live:
            exchange.all_tokens(own)
        return live.peak

    parts = 4 * SAMPLES * divided.own.seq_length * divided.exchanged_channels
    for peak in run_context_ranks(ranks, on_rank):
        assert 2 * parts <= peak <= 3 * parts


def test_one_rank_has_no_buffers_for_a_link() -> None:
    assert tensor_buffer_bytes(small_config(), RankShare(SAMPLES, 4), uses_streams=True) == 0
