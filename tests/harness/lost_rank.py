"""The entry, on a rank LOST that is killed or stopped (HOW) when it gets to the point WHERE; a program for tests of lost ranks."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from typing import Any

# The call at whose beginning the rank is lost.
POINTS = {
    "join": "megatron_zpp.parallel.joining.member:Member.this_process",
    "inviting or claiming": "megatron_zpp.parallel.joining.join:connected_store",
    "connecting": "torch.distributed:init_process_group",
    "making groups": "megatron_zpp.training.setup:build_links",
    "preparing data": "megatron_zpp.training.setup:build_run_data",
    "after the roll call": "megatron_zpp.training.startup_checks:check_save_is_shared",
    "first step": "megatron_zpp.zero.gradients:UnitGradient.descend",
    "tensor sum": "megatron_zpp.comm.tensor_link:TensorLink.summed",
    "exchange": "megatron_zpp.comm.context_link:ContextLink.exchange",
    "evaluation": "megatron_zpp.training.trainer:evaluate",
    "save": "megatron_zpp.checkpoint.saver:CheckpointSaver._write_share",
    "leaving": "megatron_zpp.parallel.initialize:World.leave",
}


def lose_at(where: str, how: signal.Signals) -> None:
    """Lets this process be killed or stopped there."""
    module_name, _, name = POINTS[where].partition(":")
    owner: Any = importlib.import_module(module_name)
    *owners, name = name.split(".")
    for part in owners:
        owner = getattr(owner, part)
    call = getattr(owner, name)

    def lose(*arguments: Any, **options: Any) -> Any:
        if where == "connecting":
            time.sleep(1.0)  # until the others have read that all have come
        os.kill(os.getpid(), how)
        return call(*arguments, **options)

    setattr(owner, name, lose)


if __name__ == "__main__":
    from pretrain_zeropp_gpt import main

    if os.environ["RANK"] == os.environ["LOST"]:
        lose_at(os.environ["WHERE"], signal.Signals[os.environ["HOW"]])
    sys.exit(main(sys.argv[1:]))
