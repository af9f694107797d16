"""What autograd keeps on a rank that shares layers or samples, and what exists at once while something crosses a link."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.context_ranks import run_context_ranks
from harness.live_bytes import LiveBytes
from harness.planned_rank import peak_of_model, planned_activations
from harness.small_gpt import small_config
from harness.tensor_ranks import run_tensor_ranks
from torch import Tensor

from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.tensor_parallel.head_exchange import HeadExchange
from megatron_zpp.training.plan.kinds import PAYLOADS
from megatron_zpp.training.plan.live_memory import bias_buffer_bytes

pytestmark = pytest.mark.virtual

SHAPE: dict[str, Any] = {"num_layers": 6, "hidden_size": 96, "ffn_hidden_size": 384, "kv_channels": 24, "num_attention_heads": 4}
SHAPE |= {"seq_length": 64, "max_position_embeddings": 64}
SAMPLES, VOCAB = 3, 64

token_orders = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all tokens", "own tokens"])


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
def test_a_recomputed_chunk_keeps_the_hidden_states_that_a_rank_has(sequence_parallel: bool) -> None:
    hidden = SAMPLES * SHAPE["seq_length"] * SHAPE["hidden_size"] * 4 // (2 if sequence_parallel else 1)
    kinds: list[dict[str, Any]] = [{"recompute_granularity": "full", "recompute_num_layers": count} for count in (1, 6)]
    chunks, whole = kinds
    of_chunks, of_whole = (kept_bytes(torch.float32, 2, sequence_parallel=sequence_parallel, **kind) for kind in (chunks, whole))
    assert of_chunks - of_whole == 5 * hidden
    deeper, shallower = (planned_bytes(2, sequence_parallel=sequence_parallel, **(chunks | {"num_layers": layers})) for layers in (12, 6))
    assert deeper - shallower == 6 * hidden


def planned_bytes(ranks: int, *, sequence_parallel: bool, is_on_gpu: bool = False, **changes: Any) -> int:
    grid = Grid.of_nodes(1, ranks, ranks)
    return peak_of_model(
        planned_activations(
            small_config(**(SHAPE | changes)), VOCAB, SAMPLES, torch.float32, grid, sequence_parallel=sequence_parallel, is_on_gpu=is_on_gpu
        )
    )


def test_with_sequence_parallelism_all_that_a_block_keeps_is_divided() -> None:
    whole, one_more = (planned_bytes(1, sequence_parallel=False, num_layers=layers) for layers in (6, 7))
    of_rank, one_more_of_rank = (planned_bytes(4, sequence_parallel=True, num_layers=layers) for layers in (6, 7))
    assert one_more_of_rank - of_rank == (one_more - whole) / 4


def test_tensor_ranks_share_heads_feed_forward_and_vocabulary_and_have_whole_hidden_states() -> None:
    changes: dict[str, Any] = {"num_attention_heads": 8, "hidden_dropout": 0.1}
    alone, shared = (  # what one more block keeps
        planned_bytes(ranks, sequence_parallel=False, num_layers=7, **changes) - planned_bytes(ranks, sequence_parallel=False, **changes)
        for ranks in (1, 4)
    )
    whole = 4 * (4 * SHAPE["hidden_size"]) + 2 * 2 * 4  # per token: fp32 values, statistics
    tokens = SAMPLES * SHAPE["seq_length"]
    assert shared == (alone - tokens * whole) / 4 + tokens * whole


@token_orders
def test_on_a_gpu_sums_of_forward_have_a_buffer_that_lasts(sequence_parallel: bool) -> None:
    """On a CPU the sums are made where their parts are."""
    lasting = {
        is_on_gpu: planned_activations(
            small_config(**SHAPE),
            VOCAB,
            SAMPLES,
            torch.bfloat16,
            Grid.of_nodes(1, 2, 2),
            sequence_parallel=sequence_parallel,
            is_on_gpu=is_on_gpu,
        ).lasting[PAYLOADS]
        for is_on_gpu in (False, True)
    }
    assert lasting[True] - lasting[False] >= SAMPLES * SHAPE["seq_length"] * SHAPE["hidden_size"] * 2


@pytest.mark.parametrize(("tokens", "width", "mebibytes"), [(8192, 1024, 64), (4096, 3072, 96), (8192, 3072, 132)])
def test_the_gradient_of_a_bias_needs_the_buffer_that_torch_takes_on_132_processors(
    tokens: int, width: int, mebibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_zpp.training.plan.live_memory.PROCESSORS", 132)
    assert bias_buffer_bytes(tokens, width) == pytest.approx(mebibytes * 2**20, rel=0.02)  # seen with benchmarks/fake_gpus.py


def test_a_feed_forward_half_without_biases_needs_no_buffer_though_queries_of_the_same_width_have_one() -> None:
    changes: dict[str, Any] = {"ffn_hidden_size": 3 * SHAPE["hidden_size"], "add_qkv_bias": True}
    with_all, with_one = (
        planned_bytes(1, sequence_parallel=False, is_on_gpu=True, disable_bias_linear=disable, **changes) for disable in (False, True)
    )
    assert with_one < with_all


# ---- ranks that divide samples


def kept_of_divided(dtype: torch.dtype, ranks: int, **changes: Any) -> int:
    """The same as `kept_bytes` on the last of `ranks` ranks that divide the tokens of each sample; with one rank, it has them whole."""
    tokens = torch.randint(VOCAB, (SAMPLES, SHAPE["seq_length"] // ranks), generator=torch.Generator().manual_seed(3))
    return run_context_ranks(ranks, lambda link: _kept(small_config(**(SHAPE | changes)), dtype, tokens, None, link))[-1]


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
    own_tokens = SHAPE["seq_length"] // ranks

    def on_rank(link: ContextLink) -> int:
        exchange = HeadExchange(link, groups, config.num_attention_heads // groups, config.kv_channels)
        own = torch.zeros(SAMPLES, own_tokens, config.qkv_width)
        with LiveBytes() as live:
            exchange.all_tokens(own)
        return live.peak

    channels = config.num_attention_heads + 2 * max(groups, ranks)  # heads; a group that several ranks need is sent to each
    parts = 4 * SAMPLES * own_tokens * channels * config.kv_channels
    for peak in run_context_ranks(ranks, on_rank):
        assert 2 * parts <= peak <= 3 * parts
