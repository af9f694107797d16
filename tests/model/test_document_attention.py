from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType

import pytest
import torch
from harness.small_gpt import ARCHITECTURES, sample_batch, small_gpt
from megatron_zpp.model.activations import mask_bytes
from torch import Tensor

from megatron_zpp.model import document_attention
from megatron_zpp.model.attention_kernel import HeadShape
from megatron_zpp.model.document_attention import MaskedDocuments, has_varlen, separated
from megatron_zpp.model.gpt import GPT

CPU = torch.device("cpu")
# Three samples of twelve tokens: several documents, one of a single token, and a sample that is one document.
LENGTHS = [5, 1, 6, 3, 9, 12]
# Logits are up to 2, so fp32 rounds them to 2^-24 and bf16 to 2^-8. About ten sums on the way have the same terms in another order.
# A token of another document changes them by about 1.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-5}
LARGEST_LOGIT = 2.0


@pytest.fixture
def varlen_documents() -> ModuleType:
    """The module, which imports torch's compiler: not while tests are collected."""
    return import_module("megatron_zpp.model.varlen_documents")


def positions_of(lengths: list[int], shape: tuple[int, int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).view(shape)


def logits(model: GPT, tokens: Tensor, lengths: list[int] | None, *, resets_positions: bool = True) -> Tensor:
    shape = (tokens.shape[0], tokens.shape[1])
    with torch.no_grad():
        return model(
            tokens,
            None,
            first_sample=0,
            position_ids_BS=positions_of(lengths, shape) if lengths and resets_positions else None,
            document_lengths_R=torch.tensor(lengths) if lengths else None,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("architecture", ["GPT-2", "Llama", "one key head, neighbours rotate"])
def test_logits_of_a_packed_document_equal_those_of_the_document_alone(dtype: torch.dtype, recomputes: bool, architecture: str) -> None:
    model = small_gpt(recompute_granularity="full" if recomputes else None, dtype=dtype, **ARCHITECTURES[architecture])
    tokens, _ = sample_batch()
    packed = logits(model, tokens, LENGTHS).flatten(0, 1)
    start = 0
    for length in LENGTHS:
        alone = logits(model, tokens.flatten()[start : start + length].view(1, length), None)
        assert (packed[start : start + length] - alone[0]).abs().max() <= TOLERANCE[dtype] and alone.abs().max() < LARGEST_LOGIT
        start += length


def test_without_the_mask_the_logits_would_differ() -> None:
    model, (tokens, _) = small_gpt(), sample_batch()
    assert (logits(model, tokens, LENGTHS) - logits(model, tokens, None)).abs().max() > 0.1


def test_the_first_document_of_a_sample_sees_nothing_of_what_follows_and_mask_and_positions_are_apart() -> None:
    model, (tokens, _) = small_gpt(), sample_batch()
    masked = logits(model, tokens, LENGTHS, resets_positions=False)
    whole = logits(model, tokens, None)
    assert (masked[0, :5] - whole[0, :5]).abs().max() <= TOLERANCE[torch.float32]
    assert (masked[0, 5:] - whole[0, 5:]).abs().max() > 0.1
    assert (masked[2] - whole[2]).abs().max() <= TOLERANCE[torch.float32]  # one document: nothing changes


def test_samples_of_one_document_each_run_as_without_documents_bit_for_bit() -> None:
    model, (tokens, _) = small_gpt(), sample_batch()
    assert separated(torch.tensor([12, 12, 12]), (3, 12), HeadShape(torch.float32, 10, False), CPU) is None
    assert torch.equal(logits(model, tokens, [12, 12, 12]), logits(model, tokens, None))


def gradients(model: GPT, tokens: Tensor, labels: Tensor) -> list[Tensor]:
    lengths = torch.tensor(LENGTHS)
    positions = positions_of(LENGTHS, (3, 12))
    model(tokens, labels, first_sample=3, position_ids_BS=positions, document_lengths_R=lengths).sum().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("architecture", ["GPT-2", "Llama"])
def test_recomputation_keeps_the_documents(dropout: float, architecture: str) -> None:
    """Equal bit for bit: the recomputed forward has the same mask and the same angles, and drops the same."""
    tokens, labels = sample_batch()
    changes = {"attention_dropout": dropout, "hidden_dropout": dropout, **ARCHITECTURES[architecture]}
    plain = gradients(small_gpt(**changes).train(), tokens, labels)
    for granularity in ("full", "selective"):
        recomputed = gradients(small_gpt(recompute_granularity=granularity, **changes).train(), tokens, labels)
        for one, other in zip(plain, recomputed, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("architecture", ["GPT-2", "Llama"])
def test_gradients_of_packed_documents_are_the_sum_over_documents_alone(architecture: str) -> None:
    model, (tokens, labels) = small_gpt(**ARCHITECTURES[architecture]), sample_batch()
    packed = gradients(model, tokens, labels)
    start = 0
    for length in LENGTHS:
        span = slice(start, start + length)
        model(tokens.flatten()[span].view(1, -1), labels.flatten()[span].view(1, -1), first_sample=0).sum().backward()
        start += length
    alone = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for one, other in zip(packed, alone, strict=True):
        # Sums over 36 tokens, of products of such values.
        assert (one - other).abs().max() <= 10 * TOLERANCE[torch.float32] * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("lengths", [[12, 12, 11], [12, 24], [36, 0, 1]])
def test_runs_that_are_not_the_samples_are_a_broken_invariant(lengths: list[int]) -> None:
    with pytest.raises(RuntimeError, match="are not 3 samples of 12"):
        separated(torch.tensor(lengths), (3, 12), HeadShape(torch.float32, 10, False), CPU)


def test_one_mask_serves_all_blocks_and_its_size_is_said() -> None:
    mask = MaskedDocuments(torch.tensor(LENGTHS), (3, 12), HeadShape(torch.bfloat16, 10, False), CPU)._mask_B1SS
    assert mask.numel() * mask.itemsize == mask_bytes(3, 12, element_bytes=2)
    assert "a mask of 16.0 MiB per micro-batch" in document_attention.describe(CPU, HeadShape(torch.float32, 64, False), (4, 1024))


def test_documents_come_to_a_gpu_as_micro_batches_do_so_the_host_waits_for_none(
    monkeypatch: pytest.MonkeyPatch, varlen_documents: ModuleType
) -> None:
    copied: list[Tensor] = []

    def note(device: torch.device, values: Tensor) -> Tensor:
        copied.append(values)
        return values

    for module in (document_attention, varlen_documents):
        monkeypatch.setattr(module, "copied_to", note)
    MaskedDocuments(torch.tensor(LENGTHS), (3, 12), HeadShape(torch.float32, 10, False), CPU)
    varlen_documents.VarlenDocuments(torch.tensor(LENGTHS), torch.device("cuda"))
    assert [values.dtype for values in copied] == [torch.int64, torch.int32]


def block_by_block(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """What variable-length attention computes, one run after the other: [T, N, D]."""
    spans = [slice(start, stop) for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    assert longest == max(span.stop - span.start for span in spans)
    runs = ([tensor[span].transpose(0, 1)[None] for tensor in (query, key, value)] for span in spans)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return torch.cat([attend(*run)[0].transpose(0, 1) for run in runs])


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("takes_shared_heads", [False, True])
def test_runs_reach_the_variable_length_kernel_in_its_layout(
    monkeypatch: pytest.MonkeyPatch, varlen_documents: ModuleType, key_heads: int, takes_shared_heads: bool
) -> None:
    monkeypatch.setattr(varlen_documents, "_varlen_attention", block_by_block)
    monkeypatch.setattr(varlen_documents, "_varlen_takes_shared_heads", lambda: takes_shared_heads)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(3, heads, 12, 8, generator=generator) for heads in (4, key_heads, key_heads))
    lengths = torch.tensor(LENGTHS)
    varlen = varlen_documents.VarlenDocuments(lengths, CPU).attend(query, key, value, 0.0)
    masked = MaskedDocuments(lengths, (3, 12), HeadShape(torch.float32, 8, False), CPU).attend(query, key, value, 0.0)
    assert (varlen - masked).abs().max() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("queries_per_group", [1, 3])
def test_the_variable_length_kernel_is_used_only_where_it_agrees_with_the_mask(
    monkeypatch: pytest.MonkeyPatch, varlen_documents: ModuleType, queries_per_group: int
) -> None:
    head = HeadShape(torch.bfloat16, 8, False, queries_per_group)
    monkeypatch.setattr(varlen_documents, "_varlen_attention", block_by_block)
    assert document_attention._agrees_with_mask(CPU, head)
    backends: list[str] = []
    monkeypatch.setattr(document_attention, "attend", lambda *heads, backend, **options: backends.append(backend) or heads[0] * 0)
    assert not document_attention._agrees_with_mask(CPU, replace(head, backend="flash"))
    assert backends == ["auto"]  # on GPUs flash, which is to be compared, takes no mask
    monkeypatch.undo()

    def crossing(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        ends = torch.tensor([0, int(bounds[-1])], dtype=torch.int32)
        return block_by_block(query, key, value, ends, int(bounds[-1]))

    monkeypatch.setattr(varlen_documents, "_varlen_attention", crossing)
    assert not document_attention._agrees_with_mask(CPU, head)
    assert not has_varlen(CPU, head)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_kernel_is_the_one_that_was_tried(varlen_documents: ModuleType) -> None:
    device = torch.device("cuda")
    head = HeadShape(torch.bfloat16, 64, False)
    assert has_varlen(device, head) == (varlen_documents.varlen_function() is not None)
    assert not has_varlen(device, HeadShape(torch.float32, 64, False))
    assert not has_varlen(device, HeadShape(torch.bfloat16, 64, True))
    assert not has_varlen(device, HeadShape(torch.bfloat16, 64, False, backend="unfused"))
