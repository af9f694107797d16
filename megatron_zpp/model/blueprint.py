"""What the modules of a model are built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.tensor_parallel.context import TensorParallel


@dataclass(frozen=True)
class Blueprint:
    """The model on one rank. shape: of all parameters, and this rank's parts of them. seed: of dropout. dtype: of parameters.

    tensor: how the layers are divided; None: they are whole. context: to the ranks that have other tokens of the same samples; None: this
    rank has samples whole.
    """

    shape: ModelShape
    seed: int
    dtype: torch.dtype
    tensor: TensorParallel | None = None
    context: ContextLink | None = None

    @property
    def config(self) -> ModelConfig:
        return self.shape.config

    @property
    def context_ranks(self) -> int:
        """The number of ranks that divide the tokens of each sample."""
        return 1 if self.context is None else self.context.ranks
