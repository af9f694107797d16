from __future__ import annotations

import pytest
import torch
from harness.small_gpt import ARCHITECTURES, sample_batch, small_gpt

from megatron_zpp.model import attention_kernel
from megatron_zpp.model.attention_kernel import HeadShape, attend, check_attention

CPU = torch.device("cpu")


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
    with pytest.raises(ValueError, match=message):
        check_attention(CPU, head, masks_documents=masks)


@pytest.mark.parametrize("backend", ["auto", "flash", "unfused", "local"])
@pytest.mark.parametrize("masks", [False, True])
def test_a_kernel_that_can_run_is_accepted_and_leaves_no_trace(backend: str, masks: bool) -> None:
    state = torch.get_rng_state()
    check_attention(CPU, HeadShape(torch.float32, 24, backend == "unfused", 3, backend), masks_documents=masks)
    assert torch.equal(torch.get_rng_state(), state)
