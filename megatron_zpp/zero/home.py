"""The home of main weights and Adam's moments: the device, or the memory of its host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.comm.host_link import HostLink
from megatron_zpp.comm.links import Ladder
from megatron_zpp.zero.policy import Policy, Rung


@dataclass(frozen=True)
class Home:
    """Where the optimizer's state is kept and updated. link: between it and the device; it copies nothing if they are the same memory.

    runs_behind: whether updates are enqueued on a device, so that the host need not know the gradient norm before them.
    is_host: whether the policy says the host, even if that is the device as well.
    """

    device: torch.device
    link: HostLink
    runs_behind: bool
    is_host: bool = False

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] zeros in this memory."""
        return self.link.zeros(numel, dtype) if self.is_host else torch.zeros(numel, dtype=dtype, device=self.device)


def home_of(policy: Policy, ladder: Ladder) -> Home:
    """The home that the policy gives to the optimizer's state."""
    if policy.optimizer is Rung.HOST:
        return Home(ladder.host_link.host, ladder.host_link, runs_behind=False, is_host=True)
    return Home(ladder.device, HostLink(None), runs_behind=ladder.streams is not None)
