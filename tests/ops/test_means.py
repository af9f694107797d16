"""The mean of values that are not quantized, on whatever it runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops.means import mean_values

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["kernels", "no_kernels"], autouse=True)
def _both(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("members", [1, 2, 3, 5, 8])
def test_the_mean_is_the_sum_of_the_members_in_their_order_divided_by_their_number(dtype: torch.dtype, members: int) -> None:
    values = _members(dtype, members)
    expected = values[0].float()
    for member in values[1:]:
        expected = expected + member.float()
    expected = expected / members
    written, added, rounded = torch.full((2, 37), 3.0), torch.full((2, 37), 3.0), torch.empty(2, 37, dtype=dtype)
    mean_values(values, written, accumulate=False)
    mean_values(values, added, accumulate=True)
    mean_values(values, rounded, accumulate=False)
    assert torch.equal(written, expected)
    assert torch.equal(added, 3.0 + expected)
    assert torch.equal(rounded, expected.to(dtype))


def test_the_rows_of_a_payload_are_read_where_they_are() -> None:
    payloads = torch.zeros(3, 2, 112, dtype=torch.uint8)
    run = payloads[..., 16:90].view(torch.bfloat16)
    run.copy_(_members(torch.bfloat16, 3))
    mean, expected = torch.empty(2, 37), torch.empty(2, 37)
    mean_values(run, mean, accumulate=False)
    mean_values(run.contiguous(), expected, accumulate=False)
    assert torch.equal(mean, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_where_it_is(bad: float) -> None:
    values = _members(torch.bfloat16, 3)
    values[1, 1, 5] = bad
    mean = torch.empty(2, 37, dtype=torch.bfloat16)
    mean_values(values, mean, accumulate=False)
    assert (~mean.isfinite()).nonzero().tolist() == [[1, 5]]


@pytest.mark.parametrize(
    ("members", "mean", "accumulate", "message"),
    [
        (torch.ones(2, 1, 3).double(), torch.ones(1, 3), False, "members is torch.float64; expected torch.float32 or torch.bfloat16"),
        (torch.ones(2, 1, 3), torch.ones(1, 3).half(), False, "mean is torch.float16; expected torch.float32 or torch.float32"),
        (torch.ones(2, 1, 3).half(), torch.ones(1, 3).half(), True, "because the mean is added to it"),
        (torch.ones(2, 1, 4), torch.ones(1, 3), False, r"members has shape \[2, 1, 4\]; expected \[at least one member, 1, 3\]"),
        (torch.ones(0, 1, 3), torch.ones(1, 3), False, r"members has shape \[0, 1, 3\]"),
        (torch.ones(2, 1, 6)[..., ::2], torch.ones(1, 3), False, r"members has strides \[6, 6, 2\]; expected a contiguous inner dim"),
        (torch.ones(2, 1, 3), torch.ones(1, 3, device="meta"), False, "members on cpu, mean on meta; expected one device"),
    ],
)
def test_a_wrong_argument_is_named(members: Tensor, mean: Tensor, accumulate: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mean_values(members, mean, accumulate=accumulate)


def _members(dtype: torch.dtype, members: int) -> Tensor:
    return torch.randn(members, 2, 37, generator=torch.Generator().manual_seed(members)).to(dtype)
