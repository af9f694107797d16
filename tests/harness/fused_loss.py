"""Head and loss on a library's kernels of the loss, beside the same in plain torch. As a program, for the library it is given.

fused_loss.py LIBRARY           prints the number of cases that agree
fused_loss.py LIBRARY LABEL     computes the loss of a label that the vocabulary of 50 entries does not have
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from harness.live_bytes import LiveBytes
from megatron_zpp.model.loss import head_loss
from megatron_zpp.ops import extension
from megatron_zpp.ops.device_kind import standing_for
from megatron_zpp.training.plan.live_memory import Workspace, most_bytes

TOKENS, HIDDEN, VOCABULARY = 48, 16, 1024
CHUNKS = (0, 12)  # a part of 256 entries in backward
DTYPES = (torch.float32, torch.bfloat16)


def run(dtype: torch.dtype, chunk: int) -> tuple[list[Tensor], int]:
    """Loss and gradients, and the peak of the bytes that were made for them."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_() for rows in (TOKENS, VOCABULARY))
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    upstream = torch.linspace(-1, 1, TOKENS)
    with LiveBytes() as live:
        loss = head_loss(hidden, weight, labels, chunk)
        loss.backward(upstream)
    assert hidden.grad is not None and weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad], live.peak + hidden.nbytes


def planned_peak(dtype: torch.dtype, chunk: int) -> int:
    """The planned peak where kernels are, as they are on GPUs."""
    with torch.device("meta"):
        hidden, weight = (torch.empty(rows, HIDDEN, dtype=dtype, requires_grad=True) for rows in (TOKENS, VOCABULARY))
        labels, upstream = torch.empty(TOKENS, dtype=torch.int64), torch.empty(TOKENS)
    with standing_for("cuda"):
        return hidden.nbytes + most_bytes(lambda: head_loss(hidden, weight, labels, chunk).backward(upstream), Workspace(is_on_gpu=False))


def check(library: Path) -> int:
    """Raises AssertionError if losses, gradients or peaks are not as expected. Returns the cases."""
    cases = list(product(DTYPES, CHUNKS))
    expected = [run(*case)[0] for case in cases]
    extension._loaded = library
    assert extension.has_loss_kernels_for("cpu")
    for (dtype, chunk), reference in zip(cases, expected, strict=True):
        results, peak = run(dtype, chunk)
        for values, others in zip(results, reference, strict=True):
            # Sums in another order; of 16-bit gradients of logits some are rounded to the next value, and they are summed.
            tolerance = 1e-5 if values.dtype == torch.float32 else 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(values, others, rtol=tolerance, atol=tolerance * float(others.abs().max()))
        planned = planned_peak(dtype, chunk)
        assert abs(peak / planned - 1) < 0.05, (dtype, chunk, peak, planned)
    return len(cases)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.ops.load_library(sys.argv[1])
    if len(sys.argv) > 2:
        extension._loaded = Path(sys.argv[1])
        head_loss(torch.zeros(2, 5), torch.zeros(50, 5), torch.tensor([0, int(sys.argv[2])]), 1)
    else:
        print(check(Path(sys.argv[1])))
