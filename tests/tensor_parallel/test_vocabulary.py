"""Tables whose rows tensor ranks share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness.tensor_ranks import run_tensor_ranks
from torch import Tensor, nn

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.tensor_parallel.vocabulary import DividedTable

pytestmark = pytest.mark.virtual

ROWS, WIDTH = 12, 5


def whole_table() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def divided_table(link: TensorLink) -> DividedTable:
    table = DividedTable(ROWS // link.ranks, WIDTH, link, dtype=torch.float32)
    table.weight = nn.Parameter(whole_table().chunk(link.ranks)[link.rank].clone())
    return table


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_id_has_its_row_on_one_rank_and_zeros_on_the_others(ranks: int) -> None:
    ids = torch.arange(ROWS).view(3, 4)
    found = run_tensor_ranks(ranks, lambda link: divided_table(link)(ids).detach())
    for rank, rows in enumerate(found):
        is_own = (ids // (ROWS // ranks) == rank)[..., None]
        assert torch.equal(rows, torch.where(is_own, whole_table()[ids], 0.0))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_of_another_rank_hides_no_nan_of_its_own_and_takes_none_of_the_others(ranks: int) -> None:
    def on_rank(link: TensorLink) -> Tensor:
        table = divided_table(link)
        with torch.no_grad():
            table.weight[0] = float("nan") if link.rank == 0 else 1.0
        rows: Tensor = table(torch.tensor([0, ROWS - 1])).detach()
        return rows

    first, *others = run_tensor_ranks(ranks, on_rank)
    assert first[0].isnan().all() and not first[1].isnan().any()
    assert not any(rows.isnan().any() for rows in others)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_gradient_of_each_rows_is_that_of_the_whole_table(ranks: int) -> None:
    ids = torch.randint(ROWS, (3, 20), generator=torch.Generator().manual_seed(1))
    grad = torch.randn(3, 20, WIDTH, generator=torch.Generator().manual_seed(2))
    whole = whole_table().requires_grad_()
    (expected,) = torch.autograd.grad(F.embedding(ids, whole), whole, grad)

    def on_rank(link: TensorLink) -> Tensor:
        table = divided_table(link)
        (own,) = torch.autograd.grad(table(ids), table.weight, grad)
        return own

    assert torch.equal(torch.cat(run_tensor_ranks(ranks, on_rank)), expected)


@pytest.mark.parametrize("unknown", [-1, ROWS])
def test_an_id_that_no_rank_has_is_an_error_on_every_rank(unknown: int) -> None:
    def on_rank(link: TensorLink) -> None:
        with pytest.raises(IndexError):
            divided_table(link)(torch.tensor([0, unknown]))

    run_tensor_ranks(2, on_rank)
