"""The softmax of logits whose vocabulary tensor ranks share: what ranks tell each other of their parts, three numbers per token.

R tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_zpp.comm.tensor_link import TensorLink


class LogitParts(NamedTuple):
    """Of each token, in fp32. For logits that a rank shares with others: of its own part."""

    largest_R: Tensor
    sum_R: Tensor  # of exp(logit - largest)
    label_R: Tensor  # the label's logit; 0 if another rank has it

    def loss_R(self) -> Tensor:
        """-log softmax(logits)[label]."""
        return self.sum_R.log() - (self.label_R - self.largest_R)


def combined(own: LogitParts, link: TensorLink) -> LogitParts:
    """The parts of the whole vocabulary, from those of all ranks, with the same bits on every rank. One gather."""
    parts = link.gather(torch.stack(own, dim=-1)).unbind(0)
    largest_R = parts[0][:, 0]
    for part in parts[1:]:
        largest_R = torch.maximum(largest_R, part[:, 0])
    sum_R, label_R = torch.zeros_like(largest_R), torch.zeros_like(largest_R)
    for part in parts:
        sum_R += part[:, 1] * (part[:, 0] - largest_R).exp()
        label_R += part[:, 2]
    return LogitParts(largest_R, sum_R, label_R)
