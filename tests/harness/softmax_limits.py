"""A library's kernels of the loss where 32 bits do not hold an offset, and on arguments that do not fit together. As a program, for the
library it is given.
"""

from __future__ import annotations

import mmap
import re
import sys
from itertools import product
from typing import Any

import pytest
import torch

from testbed.kernels.softmax_errors import FIRST, parts_of

FAR = 2**31  # elements between two rows
MAP_NORESERVE = 0x4000  # of mmap(2)

LOGITS, LABELS, NUMBERS = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.zeros(2)
MISTAKES = [
    ("logits", LOGITS[:, :0], "logits must have columns"),
    ("first", -1, "first must be at least 0, not -1"),
    ("labels", LABELS.int(), "labels must be Long, not Int"),
    ("largest", NUMBERS[:1], "largest must be contiguous with one number for each of 2 tokens"),
    ("sums", torch.zeros(4)[::2], "sums must be contiguous with one number"),
    ("entries", 103, "entries must be at least 100 + 4, not 103"),
    ("label", NUMBERS.double(), "label must be Float, not Double"),
    ("grad_loss", NUMBERS[:1], "grad_loss must be contiguous with one number"),
    ("gradient", LOGITS.half(), "gradient is Half [2, 4]; expected that of logits, [2, 4]"),
    ("gradient", LOGITS[:, :3], "gradient is Float [2, 3]; expected that of logits, [2, 4]"),
]


def check_far_rows() -> None:
    """Raises AssertionError if rows that are far apart have other results than neighbours."""
    near, labels = torch.randn(2, 7, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.full((2,), FIRST)
    memory = mmap.mmap(-1, 2 * (FAR + 7), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    far = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((2, 7), (FAR, 1)).copy_(near)
    parts = parts_of(torch.ops.megatron_zpp, far, labels)
    assert all(map(torch.equal, parts, parts_of(torch.ops.megatron_zpp, near, labels)))
    for rows in (near, far):
        torch.ops.megatron_zpp.softmax_gradient(rows, labels, FIRST, *parts[:2], torch.ones(2), rows)
    assert torch.equal(near, far)


def check_refusals() -> int:
    """Raises AssertionError if arguments are accepted with which a kernel would leave its tensors. Returns the cases."""
    refused = 0
    given = {"logits": LOGITS, "labels": LABELS, "first": 100, "largest": NUMBERS, "sums": NUMBERS}
    arguments_of: dict[str, dict[str, Any]] = {
        "softmax_parts": {**given, "entries": 104, "label": NUMBERS},
        "softmax_gradient": {**given, "grad_loss": NUMBERS, "gradient": LOGITS},
    }
    for (op, arguments), (name, value, words) in product(arguments_of.items(), MISTAKES):
        if name in arguments:
            with pytest.raises(RuntimeError, match=re.escape(words)):
                getattr(torch.ops.megatron_zpp, op)(**{**arguments, name: value})
            refused += 1
    return refused


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.ops.load_library(sys.argv[1])
    check_far_rows()
    print(check_refusals())
