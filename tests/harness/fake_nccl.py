"""Stands in for torch's NCCL options, which builds of torch without CUDA lack."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch.distributed as dist


@dataclass
class NcclConfig:
    """As ncclConfig_t; None where NCCL decides."""

    min_ctas: int | None = None
    max_ctas: int | None = None


@dataclass
class NcclOptions:
    """As ProcessGroupNCCL.Options; torch's default timeout is 10 minutes."""

    is_high_priority_stream: bool = False
    config: NcclConfig = field(default_factory=NcclConfig)
    _timeout: timedelta = timedelta(minutes=10)


class ProcessGroupNCCL:
    """Has the options alone."""

    Options = NcclOptions


def give_torch_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
