from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness.rank_pool import RankPool

from megatron_zpp.zero.shard import shard

pytestmark = pytest.mark.gloo


def evaluates_on_rank_0_alone() -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    engine = shard(model, ["0", "1", "2"], timeout=timedelta(seconds=2))
    try:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(2, 32))
        for _ in range(3):
            engine.backward(model(torch.ones(2, 32)).square().mean())
            engine.step(1e-3)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_the_error_of_ranks_that_wait_in_vain_names_the_cause_and_what_each_has_asked_for() -> None:
    pool = RankPool()
    try:
        texts = pool.run(1, 2, evaluates_on_rank_0_alone)
    finally:
        pool.close()
    asked = r"the (weights|mean gradient) of unit \d, its hop \d+"
    for text in texts:
        assert "ranks made different calls, such as an evaluation within `if rank == 0:`" in text
        assert re.search(f"What each rank has asked for last: rank 0: {asked}; rank 1: {asked}$", text), text
