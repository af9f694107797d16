"""How a model is divided over the ranks of a tensor link."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.comm.tensor_link import TensorLink


@dataclass(frozen=True)
class TensorParallel:
    """The link over which a rank shares every layer, T ranks in all.

    sequence_parallel: whether a rank also has only its own tokens between the layers: of the B S tokens of a micro-batch, one sample after
    the other, the t-th of T equal parts. Otherwise all ranks have all tokens there (Korthikanti et al., arXiv 2205.05198).
    """

    link: TensorLink
    sequence_parallel: bool = False

    @property
    def token_parts(self) -> int:
        """The number of parts that the tokens are divided into between the layers."""
        return self.link.ranks if self.sequence_parallel else 1

    @property
    def own_token_part(self) -> int:
        """The part of the tokens that the rank has there."""
        return self.link.rank if self.sequence_parallel else 0
