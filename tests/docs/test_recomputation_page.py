"""docs/recomputation.md: the figures of its example of kept inputs are those of the plan."""

from __future__ import annotations

import re

import pytest
from harness.places import ROOT

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.counted import in_gib
from megatron_zpp.config.resolve import resolve
from megatron_zpp.training.memory_need import memory_need
from megatron_zpp.training.plan.kinds import ACTIVATIONS
from megatron_zpp.training.sharding import grid_of

pytestmark = pytest.mark.pure

MODEL = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 2048
    --max-position-embeddings 2048 --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --disable-bias-linear --vocab-size 32000 --ranks-per-node 8 --bf16 --hidden-dropout 0 --attention-dropout 0 --global-batch-size 64
    --mock-data --train-iters 1 --micro-batch-size 8 --zero-stage 3 --checkpoint-activations"""
PAGE = (ROOT / "docs" / "recomputation.md").read_text(encoding="utf-8").split("# Where the inputs are kept")[1]
ROWS = re.findall(r"^\| (none|`--[^`]+`) \| ([\d.]+ .iB) \| ([\d.]+ .iB) \|$", PAGE, re.MULTILINE)


def test_the_example_has_rows() -> None:
    assert len(ROWS) == 6


@pytest.mark.parametrize("flags, device, host", ROWS, ids=[row[0] for row in ROWS])
def test_each_row_of_the_example_is_the_plan_of_its_flags(flags: str, device: str, host: str) -> None:
    config = resolve(parse_flags(f"{MODEL} {flags.strip('`').removeprefix('none')}".split()), 8, 8)
    need = memory_need(config, 32000, grid_of(config, 8), is_on_gpu=True)
    assert (in_gib(need.of(ACTIVATIONS)), in_gib(need.host)) == (device, host)
