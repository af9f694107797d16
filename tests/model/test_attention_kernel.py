from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.small_gpt import ARCHITECTURES, sample_batch, small_config, small_gpt
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_zpp.model import attention_kernel
from megatron_zpp.model.attention_kernel import HeadShape, attend, check_attention, head_shape_of, kernel_order
from megatron_zpp.system.user_error import UserError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
AMPERE, HOPPER, BLACKWELL, CONSUMER = (8, 0), (9, 0), (10, 0), (12, 0)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cudnn: int | None = 92000) -> None:
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)


@pytest.mark.parametrize(
    ("capability", "cudnn", "is_plain", "expected"),
    [
        (AMPERE, 92000, True, None),
        (CONSUMER, 92000, True, None),
        (HOPPER, 92000, True, [CUDNN, FLASH, EFFICIENT, MATH]),
        (HOPPER, 91501, True, [CUDNN, FLASH, EFFICIENT, MATH]),
        (HOPPER, 91500, True, [FLASH, EFFICIENT, MATH]),
        (HOPPER, None, True, [FLASH, EFFICIENT, MATH]),
        (HOPPER, 92000, False, [FLASH, EFFICIENT, MATH]),
        (BLACKWELL, 92000, True, [FLASH, EFFICIENT, MATH]),
    ],
)
def test_auto_tries_cudnn_first_on_hopper_for_plain_causal_attention_alone_and_never_lets_torch_choose_it_elsewhere(
    capability: tuple[int, int], cudnn: int | None, is_plain: bool, expected: list[SDPBackend] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability, cudnn)
    assert kernel_order(GPU, "auto", is_plain=is_plain, has_mask=False) == expected


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
def test_fused_tries_cudnn_first_and_under_a_mask_whose_gradients_it_spoils_not_at_all(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability)
    assert kernel_order(GPU, "fused", is_plain=True, has_mask=False) == [CUDNN, EFFICIENT]
    assert kernel_order(GPU, "fused", is_plain=False, has_mask=True) == [EFFICIENT]


def test_in_deterministic_mode_auto_is_torchs_own_order_which_leaves_cudnn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, HOPPER)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert kernel_order(GPU, "auto", is_plain=True, has_mask=False) is None


class Recorder:
    """Stands in for sdpa_kernel: notes what it is given, and passes it on. calls: kernels, and whether their order counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[list[SDPBackend], bool]] = []
        monkeypatch.setattr(attention_kernel, "sdpa_kernel", self._called)

    def _called(self, kernels: list[SDPBackend], set_priority: bool = False) -> AbstractContextManager[Any]:
        self.calls.append((kernels, set_priority))
        return sdpa_kernel(kernels, set_priority=set_priority)


def heads(count: int, tokens: int) -> Tensor:
    return torch.randn(1, count, tokens, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("tokens", "key_heads", "dropout", "masked", "is_plain"),
    [
        (256, 4, 0.0, False, True),
        (192, 4, 0.0, False, False),
        (256, 2, 0.0, False, False),
        (256, 4, 0.5, False, False),
        (256, 4, 0.0, True, False),
    ],
)
def test_the_order_counts_and_masks_dropout_shared_heads_and_odd_lengths_are_not_plain(
    tokens: int, key_heads: int, dropout: float, masked: bool, is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: list[bool] = []

    def order(device: torch.device, backend: str, *, is_plain: bool, has_mask: bool) -> list[SDPBackend]:
        assert has_mask == masked
        plain.append(is_plain)
        return [FLASH, MATH]

    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(attention_kernel, "kernel_order", order)
    mask = torch.zeros(1, 1, tokens, tokens) if masked else None
    key = heads(key_heads, tokens)
    attend(heads(4, tokens), key, key, dropout=dropout, backend="auto", mask_B1SS=mask)
    assert plain == [is_plain] and recorder.calls == [([FLASH, MATH], True)]


def test_an_order_of_kernels_ends_with_a_call_that_fails() -> None:
    before = torch._C._get_sdp_priority_order()
    with pytest.raises(RuntimeError, match="."):
        attend(heads(4, 8), heads(4, 8), heads(4, 8), dropout=0.0, backend="fused")
    assert torch._C._get_sdp_priority_order() == before


def test_a_compiled_call_sets_the_order_too_without_leaving_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, whose kernels are tried in the same way; the order begins with plain products there, which flash would precede."""
    seen: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> Any:
        seen.append(graph)
        return graph.forward

    pretend_gpu(monkeypatch, HOPPER)
    original = attention_kernel.kernel_order
    monkeypatch.setattr(attention_kernel, "kernel_order", lambda device, backend, **call: original(GPU, backend, **call))
    query = heads(4, 256)
    attention_kernel.take_as_constants()
    compiled = torch.compile(lambda query: attend(query, query, query, dropout=0.0, backend="auto"), fullgraph=True, backend=keep)
    torch.testing.assert_close(compiled(query), attend(query, query, query, dropout=0.0, backend="auto"))
    orders = [node.args for node in seen[0].graph.nodes if node.target is torch.nn.attention._sdpa_kernel]
    assert len(orders) == 2 and orders[0][1] is True  # set, and set back


@pytest.mark.parametrize("backend", ["flash", "unfused", "local"])
@pytest.mark.parametrize("architecture", ["GPT-2", "Llama"])
def test_every_kernel_gives_the_loss_of_torchs_choice_within_fp32_rounding(backend: str, architecture: str) -> None:
    tokens_BS, labels_BS = sample_batch()
    expected, found = (
        small_gpt(**ARCHITECTURES[architecture], attention_backend=name)(tokens_BS, labels_BS, first_sample=0) for name in ("auto", backend)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_only_the_kernel_that_was_asked_for_runs() -> None:
    query = torch.randn(1, 4, 8, 16, requires_grad=True)
    mixed = {backend: attend(query, query, query, dropout=0.0, backend=backend) for backend in ("auto", "flash", "unfused")}
    names = {backend: type(tensor.grad_fn).__name__ for backend, tensor in mixed.items()}
    assert "Flash" in names["flash"] and names["auto"] == names["flash"] and "Flash" not in names["unfused"]


def test_heads_repeated_for_their_queries_mix_as_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, heads, 8, 16, generator=generator) for heads in (6, 2, 2))
    shared = attend(query, key, value, dropout=0.0, backend="auto")
    monkeypatch.setattr(attention_kernel, "_takes_shared_heads", lambda *_, has_mask: False)
    repeated = attend(query, key, value, dropout=0.0, backend="auto")
    torch.testing.assert_close(shared, repeated, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("head", "masks", "message"),
    [
        (
            HeadShape(torch.float32, 64, False, backend="fused"),
            False,
            "--attention-backend fused has no kernel on cpu for heads of 64 channels in float32; choose --attention-backend auto.",
        ),
        (HeadShape(torch.bfloat16, 64, True, backend="flash"), False, "in bfloat16, with --attention-dropout; choose"),
        (HeadShape(torch.float32, 64, True, 4, "fused"), True, "with --attention-dropout, with the mask of --reset-attention-mask; choose"),
    ],
)
def test_a_kernel_that_cannot_run_here_is_refused_before_the_first_step(head: HeadShape, masks: bool, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        check_attention(CPU, head, masks_documents=masks)
    assert refused.value.__cause__ is None


def test_a_kernel_that_fails_is_told_apart_from_one_that_torch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED\nat a place")

    monkeypatch.setattr(attention_kernel, "attend", fail)
    message = "--attention-backend fused fails on cpu with 'cuDNN error: CUDNN_STATUS_NOT_INITIALIZED' for heads of .*; choose"
    with pytest.raises(UserError, match=message) as failed:
        check_attention(CPU, HeadShape(torch.bfloat16, 64, False, backend="fused"), masks_documents=False)
    assert isinstance(failed.value.__cause__, RuntimeError)


@pytest.mark.parametrize("backend", ["auto", "flash", "unfused", "local"])
@pytest.mark.parametrize("masks", [False, True])
def test_a_kernel_that_can_run_is_accepted_and_leaves_no_trace(backend: str, masks: bool) -> None:
    state = torch.get_rng_state()
    check_attention(CPU, HeadShape(torch.float32, 24, backend == "unfused", 3, backend), masks_documents=masks)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tensor_rank_has_as_many_queries_per_group_as_before_until_ranks_share_a_group() -> None:
    config = small_config(num_attention_heads=8, num_query_groups=2)
    assert [head_shape_of(config, torch.float32, ranks).queries_per_group for ranks in (1, 2, 4, 8)] == [4, 4, 2, 1]
