"""What climbs to a secondary rung, and how it is encoded on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_zpp.comm.code import Runs
from megatron_zpp.comm.codecs import recode_mean_into
from megatron_zpp.comm.link_codecs import LinkCodecs


@dataclass(frozen=True)
class Climb:
    """The unit that climbs to a secondary rung. runs: of each slice.

    encode_own: fills the payload [1, payload_bytes] of the own slice, in the inter link's codec.
    arrive: takes the payloads [N, payload_bytes] of the column, and fills those of the secondary rung, in the intra link's codec. By
    default they are decoded and encoded again, or forwarded if both links have the same codec.
    """

    name: str
    runs: Runs
    codecs: LinkCodecs
    encode_own: Callable[[Tensor], None]
    arrive: Callable[[Tensor, Tensor], None] | None = None

    @property
    def forwards(self) -> bool:
        """Whether what comes over the inter link is the secondary rung itself."""
        return self.arrive is None and self.codecs.inter == self.codecs.intra

    def fill(self, arrived: Tensor, payloads: Tensor) -> None:
        """Fills the secondary rung from what has come over the inter link."""
        if self.arrive is not None:
            self.arrive(arrived, payloads)
        else:
            recode_mean_into(self.codecs.inter, arrived.unsqueeze(0), self.codecs.intra, payloads, self.runs)
