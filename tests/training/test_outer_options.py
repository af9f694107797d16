"""What flags say about outer steps is what they get."""

from __future__ import annotations

import pytest

from megatron_zpp.comm.code import EXACT, Code
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.training.setup import outer_options

MODEL = "--num-layers 1 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --train-iters 1000 --mock-data --zero-stage 2"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--diloco-sync-period 16", OuterOptions()),
        ("--diloco-sync-period 8 --lr-warmup-iters 50", OuterOptions(period=8, start_iteration=50)),
        (
            "--diloco-sync-period 16 --diloco-outer-lr 0.5 --diloco-outer-momentum 0.8 --diloco-start-iteration 7 --diloco-all-at-once",
            OuterOptions(learning_rate=0.5, momentum=0.8, start_iteration=7, is_staggered=False),
        ),
        (
            "--diloco-sync-period 16 --diloco-outer-bits 4 --diloco-difference-bits 1",
            OuterOptions(gradient_code=Code.gaussian(4, rounds=2), difference_code=Code.gaussian(1, rounds=1)),
        ),
        ("--diloco-sync-period 16 --diloco-overlap-steps 1", OuterOptions(overlap_steps=1)),
        ("--diloco-sync-period 16 --diloco-outer-bits 16", OuterOptions(gradient_code=EXACT)),
    ],
)
def test_flags_become_options_with_the_same_defaults(flags: str, expected: OuterOptions) -> None:
    found = outer_options(resolve(parse_flags(f"{MODEL} {flags}".split()), 4, 2))
    assert found.outer_rate == expected.outer_rate
    assert [value for name, value in vars(found).items() if name != "learning_rate"] == [
        value for name, value in vars(expected).items() if name != "learning_rate"
    ]
