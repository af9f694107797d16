"""The softmax of logits whose vocabulary tensor ranks share: what ranks tell each other of their parts, three numbers per token.

T tokens.
"""

from __future__ import annotations

import torch

from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.ops.softmax import LogitParts


def combined(own: LogitParts, link: TensorLink) -> LogitParts:
    """The parts of the whole vocabulary, from those of all ranks, with the same bits on every rank. One gather."""
    parts = link.gather(torch.stack(own, dim=-1)).unbind(0)
    largest_T = parts[0][:, 0]
    for part in parts[1:]:
        largest_T = torch.maximum(largest_T, part[:, 0])
    sums_T, label_T = torch.zeros_like(largest_T), torch.zeros_like(largest_T)
    for part in parts:
        sums_T += part[:, 1] * (part[:, 0] - largest_T).exp()
        label_T += part[:, 2]
    return LogitParts(largest_T, sums_T, label_T)
