"""The entry, on a rank 1 that is killed in its fourth step where ONCE names a file that is not there yet; a program for test_restarts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from megatron_zpp.training import trainer
from pretrain_zeropp_gpt import main

forward_backward = trainer.forward_backward
steps = 0


def step_that_kills(*arguments: Any) -> Any:
    global steps
    steps += 1
    trace = Path(os.environ["ONCE"])
    if steps == 4 and os.environ["RANK"] == "1" and not trace.exists():
        trace.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return forward_backward(*arguments)


trainer.forward_backward = step_that_kills
sys.exit(main(sys.argv[1:]))
