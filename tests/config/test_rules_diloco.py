"""Flags of islands: what they leave open, and what is refused with flag, value, rule and remedy."""

from __future__ import annotations

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config, DilocoConfig

MODEL = "--num-layers 1 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --train-iters 1000 --mock-data --lr 1e-3 --zero-stage 2"


def run_of(flags: str, nodes: int = 4, ranks_per_node: int = 2) -> Config:
    return resolve(parse_flags(f"{MODEL} {flags}".split()), nodes * ranks_per_node, ranks_per_node)


def test_without_a_period_there_is_one_world() -> None:
    assert run_of("").diloco == DilocoConfig(diloco_islands=1)


@pytest.mark.parametrize(
    ("flags", "islands", "start", "outer_lr"),
    [
        ("--diloco-sync-period 8", 4, 0, 0.2),
        ("--diloco-sync-period 16 --diloco-islands 2 --lr-warmup-iters 70", 2, 70, 0.4),
        ("--diloco-sync-period 500 --lr-warmup-fraction 0.1 --diloco-islands 1", 1, 100, 0.7),
        ("--diloco-sync-period 16 --lr-warmup-fraction 0.0101", 4, 11, 0.4),  # 80.8 of 8000 samples, of which a batch has 8
        ("--diloco-sync-period 16 --diloco-start-iteration 5 --diloco-outer-lr 1", 4, 5, 1.0),
    ],
)
def test_every_node_is_an_island_and_outer_steps_begin_after_the_warmup(flags: str, islands: int, start: int, outer_lr: float) -> None:
    diloco = run_of(flags).diloco
    assert (diloco.diloco_islands, diloco.diloco_start_iteration, diloco.diloco_outer_lr) == (islands, start, outer_lr)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--diloco-sync-period 8 --diloco-islands 3",
            "--diloco-islands 3 does not divide the 4 nodes (--ranks-per-node 2 of 8), and an island has whole nodes; choose 1, 2 or 4.",
        ),
        ("--diloco-islands 2", "--diloco-islands 2 changes nothing without --diloco-sync-period; give that as well."),
        (
            "--diloco-sync-period 8 --zero-stage 0",
            "--zero-stage 0 lets each of the 2 ranks of an island update all weights, and --diloco-sync-period divides among the islands "
            "what a rank updates; choose --zero-stage 1, 2 or 3.",
        ),
        (
            "--diloco-sync-period 8 --diloco-islands 2 --zero-quantized-weight-differences",
            "--zero-quantized-weight-differences adds differences to copies that it keeps between the nodes of an island, and "
            "--diloco-sync-period writes weights; leave it out, or give every node an island of its own by leaving --diloco-islands out.",
        ),
        (
            "--diloco-sync-period 8 --quantization-block-size 64 --diloco-outer-bits 16",
            "--quantization-block-size 64 does not fit --diloco-sync-period, whose codes have blocks of 256 values; choose a multiple of "
            "256, or --diloco-outer-bits 16 and --diloco-difference-bits 16.",
        ),
        (
            "--diloco-sync-period 8 --tensor-model-parallel-size 2 --num-query-groups 1 --kv-channels 6",
            "--num-query-groups 1 with --tensor-model-parallel-size 2: ranks share key heads of 384 weights (--kv-channels 6 x "
            "--hidden-size 64), which are no whole blocks of 256, so codes of --diloco-sync-period would differ; choose "
            "--tensor-model-parallel-size 1 or less, or --diloco-outer-bits 16 and --diloco-difference-bits 16.",
        ),
        (
            "--diloco-sync-period 8 --context-parallel-size 4",
            "--context-parallel-size 4 does not divide the 2 ranks of an island (--diloco-islands 4); choose 1 or 2.",
        ),
        (
            "--diloco-sync-period 8 --context-parallel-size 4 --zero-stage 0",
            "--context-parallel-size 4 does not divide the 2 ranks of an island (--diloco-islands 4); choose 1 or 2 and another "
            "--zero-stage.",
        ),
        (
            "--diloco-sync-period 8 --context-parallel-size 4 --tensor-model-parallel-size 2",
            "--context-parallel-size 4 does not divide the 1 data-parallel rank of an island (--diloco-islands 4, "
            "--tensor-model-parallel-size 2 of 8 ranks); choose 1.",
        ),
        (
            "--diloco-sync-period 8 --zero-quantized-gradients --zero-quantized-gradients-intra-bits 16",
            "--zero-quantized-gradients-intra-bits 16 leaves --zero-quantized-gradients nothing to quantize, because an island has one "
            "node; choose 4 or 8, or leave --zero-quantized-gradients out.",
        ),
    ],
)
def test_what_does_not_go_with_islands_is_refused_in_one_sentence(flags: str, words: str) -> None:
    with pytest.raises(FlagError) as found:
        run_of(flags)
    assert str(found.value) == words


def test_one_island_alone_has_no_codes_whose_blocks_must_fit() -> None:
    assert run_of("--diloco-sync-period 8 --diloco-islands 1 --quantization-block-size 64").diloco.diloco_islands == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--diloco-sync-period 16 --lr-warmup-iters 100", []),
        (
            "--diloco-sync-period 16 --lr-warmup-iters 100 --diloco-start-iteration 50",
            ["--diloco-start-iteration 50 is before the end of the warmup of the learning rate, iteration 100: outer momentum that"],
        ),
        (
            "--diloco-sync-period 100 --lr-warmup-iters 100",
            [
                "--diloco-sync-period 100 makes 9 outer steps of each unit from iteration 100 to --train-iters 1000; islands with fewer "
                "than 10 steps learn much less than one world"
            ],
        ),
        ("--diloco-sync-period 100 --lr-warmup-iters 100 --diloco-islands 1", []),
        (
            "--diloco-sync-period 16 --zero-quantized-gradients --tensor-model-parallel-size 2",
            ["--zero-quantized-gradients: all 2 ranks of an island have the same samples (--tensor-model-parallel-size), so nothing"],
        ),
        ("--diloco-sync-period 16 --diloco-start-iteration 2000", ["makes 0 outer steps of each unit from iteration 2000"]),
        ("--diloco-sync-period 16 --zero-quantized-gradients", ["--zero-quantized-gradients: an island has one node, so only the link"]),
    ],
)
def test_outer_steps_that_begin_too_early_or_are_few_have_a_notice(flags: str, words: list[str]) -> None:
    notices = run_of(flags).notices
    assert len(notices) == len(words) and all(text in line for text, line in zip(words, notices, strict=True))
