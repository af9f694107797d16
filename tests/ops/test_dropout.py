"""The op of dropout on whatever it runs: shapes, errors, gradients, and what autograd keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops.dropout import Gaps, dropout, mask_start

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
START = (123, 2**32 - 1000)  # of a mask whose indices pass 2^32


def kept(shape: tuple[int, ...], p: float, start: Tensor) -> Tensor:
    return dropout(torch.ones(shape), start, p) != 0


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5, 7), (2, 12, 24), (1, 300, 11)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kept_values_are_divided_by_the_probability_of_being_kept_and_the_others_are_zero(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    dropped = dropout(values, mask_start(*START), 0.25)
    scaled = (values.double() / 0.75).to(dtype)  # 1 / 0.75 is rounded to fp32, which moves a product by one place at most
    assert dropped.dtype == dtype and dropped.shape == shape
    mask = kept(shape, 0.25, mask_start(*START))
    torch.testing.assert_close(dropped[mask], scaled[mask], rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.equal(dropped[~mask], torch.zeros_like(dropped[~mask]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_is_the_same_mask_and_scale_times_the_gradient(dtype: torch.dtype) -> None:
    values, grad = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    values.requires_grad_()
    dropout(values, mask_start(*START), 0.4).backward(grad)
    assert torch.equal(values.grad, dropout(grad, mask_start(*START), 0.4))


def test_strided_values_and_gradients_have_the_indices_of_their_rows() -> None:
    values = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    turned = values.t().requires_grad_()
    dropped = dropout(turned, mask_start(*START), 0.5)
    assert torch.equal(dropped, dropout(values.t().contiguous(), mask_start(*START), 0.5))
    dropped.backward(torch.ones(1).expand(10, 6))
    assert torch.equal(turned.grad, 2.0 * kept((10, 6), 0.5, mask_start(*START)))


def test_a_part_of_the_values_has_its_part_of_the_mask() -> None:
    whole = kept((4, 9, 5), 0.3, mask_start(*START))
    key, first = START
    for sample in range(4):
        assert torch.equal(kept((9, 5), 0.3, mask_start(key, first + sample * 45)), whole[sample])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rest", [0, 1, 10, 14])
def test_with_gaps_values_have_the_mask_of_every_other_run(rest: int, dtype: torch.dtype) -> None:
    """Runs of 15 elements in samples of 45, from element `rest` of the second run on: unaligned, and across 2^32."""
    values = torch.randn(70, generator=torch.Generator().manual_seed(1)).to(dtype)
    key, first = START
    start = mask_start(key, first + 15 + rest, Gaps(15 - rest, 15, 30))
    whole = dropout(torch.ones(9, 3, 15), mask_start(key, first), 0.4) != 0
    dropped = dropout(values.requires_grad_(), start, 0.4)
    assert torch.equal(dropped != 0, whole[:, 1].flatten()[rest:][:70])
    dropped.backward(torch.ones(70, dtype=dtype))
    assert torch.equal(values.grad, dropout(torch.ones(70, dtype=dtype), start, 0.4))


def test_autograd_keeps_no_tensor() -> None:
    saved: list[Tensor] = []
    values = torch.randn(8, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        dropout(values, mask_start(*START), 0.5)
    assert saved == []


def test_the_op_passes_opcheck() -> None:
    """Its schema, its shapes without values, and its gradient as torch.compile traces it."""
    values = torch.randn(3, 16, requires_grad=True)
    for start in (mask_start(*START), mask_start(*START, Gaps(3, 20, 20))):
        torch.library.opcheck(torch.ops.megatron_zpp.dropout.default, (values, start, 0.5))


def test_dropout_reads_no_generator() -> None:
    state = torch.get_rng_state()
    dropout(torch.ones(100), mask_start(*START), 0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_with_probability_0_nothing_is_dropped_and_next_to_1_nearly_all() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(dropout(values, mask_start(*START), 0.0), values)
    assert not dropout(values, mask_start(*START), 1 - 2.0**-50).any()


@pytest.mark.parametrize(
    ("values", "p", "message"),
    [
        (torch.ones(3, dtype=torch.float64), 0.1, "values is torch.float64; expected torch.float32 or torch.bfloat16 or torch.float16."),
        (torch.ones(3), 1.0, "p is 1.0; expected a probability of at least 0 and below 1."),
        (torch.ones(3), -0.1, "p is -0.1; expected"),
        (torch.ones(3), float("nan"), "p is nan; expected"),
    ],
)
def test_a_wrong_argument_is_named(values: Tensor, p: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dropout(values, mask_start(*START), p)
