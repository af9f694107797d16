from __future__ import annotations

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.run_plan import MEMBERS, PlannedWorld, computation_by_rate, computation_by_step, plan_run

FLAGS = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --bf16 --ranks-per-node 4"


def test_the_flags_of_a_member_ask_for_the_partition_that_was_planned() -> None:
    zeropp = MEMBERS[-1]
    for asked, partition_ranks in (("", 4), ("--zero-hpz-partition-size 2", 2)):
        given = parse_flags(f"{FLAGS} {asked}".split())
        plan = plan_run(given, zeropp, PlannedWorld(2, 4, is_on_gpu=False), 128)
        assert plan.job.grid.partition_ranks == partition_ranks
        assert f"--zero-hpz-partition-size {partition_ranks}" in plan.flags


def test_tensor_ranks_share_the_operations_of_a_micro_batch() -> None:
    config = resolve(parse_flags(FLAGS.split()), 8, 4)
    alone, shared = (computation_by_rate(config, 128, 1e9, tensor_ranks) for tensor_ranks in (1, 4))
    assert shared.forward == pytest.approx([seconds / 4 for seconds in alone.forward])
    assert shared.backward == pytest.approx([seconds / 4 for seconds in alone.backward])
    assert computation_by_step(config, 128, seconds=6.0, microbatches=3).seconds == pytest.approx(2.0)
