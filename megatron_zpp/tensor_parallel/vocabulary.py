"""Tables whose rows tensor ranks share: the vocabulary, and learned positions.

T = 2, table of 8 rows     rank 0 has rows 0 to 3       rank 1 has rows 4 to 7
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.comm.tensor_link import TensorLink


@dataclass(frozen=True)
class DividedRows:
    """The rows of a table that one rank of `link` has. own_rows: how many; each rank has as many, in the order of the ranks."""

    own_rows: int
    link: TensorLink

    @property
    def rows(self) -> int:
        """The number of rows of the whole table."""
        return self.own_rows * self.link.ranks

    @property
    def first_own_row(self) -> int:
        """The number of the first own row in the whole table."""
        return self.own_rows * self.link.rank

    def found(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(place of each id's row in the part of the rank that has it, whether it is this rank).

        An id that no rank has is its own place, where looking it up is the error that it is in an undivided table.
        """
        is_known = (ids >= 0) & (ids < self.rows)
        return torch.where(is_known, ids % self.own_rows, ids), ids // self.own_rows == self.link.rank


class DividedTable(nn.Module):
    """Looks up the rank's rows. For ids whose rows other ranks have, it returns zeros; so the sum over the ranks is the row of each id."""

    def __init__(self, own_rows: int, width: int, link: TensorLink, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(own_rows, width, dtype=dtype))
        self.divided = DividedRows(own_rows, link)

    def forward(self, ids: Tensor) -> Tensor:
        """[..., width] from ids [...]."""
        places, is_own = self.divided.found(ids)
        return F.embedding(places, self.weight).masked_fill_(~is_own[..., None], 0.0)
