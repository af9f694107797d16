"""A run in which rank 1 fails in the middle of its third step; a program for test_failures."""

from __future__ import annotations

import os
import sys

from megatron_zpp.zero.gradients import UnitGradient
from pretrain_zeropp_gpt import main

descend = UnitGradient.descend
calls = 0


def failing_descend(self: UnitGradient, *, is_last_microbatch: bool) -> None:
    global calls
    calls += 1
    if calls == 10 and os.environ["RANK"] == "1":
        raise RuntimeError("the disk of rank 1 is on fire")
    descend(self, is_last_microbatch=is_last_microbatch)


UnitGradient.descend = failing_descend  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
