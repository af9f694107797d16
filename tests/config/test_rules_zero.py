"""Rules of weight differences, Gaussian codes and sums inside partitions, and what is said where they do less than usual."""

from __future__ import annotations

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.groups.zero import BLOCK_BITS, GAUSSIAN_BITS
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.ops import payload

RUN = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --train-iters 4 --lr 1e-3"
DIFFERENCES = "--zero-quantized-weight-differences"
GAUSSIAN = "--zero-quantized-gradients --zero-quantized-gradients-code gaussian"
SUMS = "--zero-gradients-between-microbatches secondary"


def resolved(flags: str, world: tuple[int, int] = (4, 2)) -> Config:
    return resolve(parse_flags(f"{RUN} {flags}".split()), *world)


def test_flags_allow_the_bits_that_codes_have() -> None:
    assert (BLOCK_BITS, GAUSSIAN_BITS) == (payload.BITS, payload.GAUSSIAN_BITS)


@pytest.mark.parametrize(
    "flags, words",
    [
        (f"--zero-stage 0 {DIFFERENCES}", [DIFFERENCES, "nothing to quantize", "choose --zero-stage 1, 2 or 3"]),
        (f"--zero-stage 0 {GAUSSIAN}", ["--zero-quantized-gradients", "nothing to quantize", "choose --zero-stage 1, 2 or 3"]),
        (f"--zero-stage 2 {DIFFERENCES} --zero-quantized-weights", [DIFFERENCES, "--zero-quantized-weights", "only one of them"]),
        (f"--zero-stage 3 {DIFFERENCES}", ["no copy", "--zero-hpz-partition-size 2", "--zero-stage 2 or 1"]),
        (f"--zero-stage 2 {DIFFERENCES} --quantization-block-size 128", ["--quantization-block-size 128", DIFFERENCES, "multiple of 256"]),
        (
            f"--zero-stage 3 {GAUSSIAN} --quantization-block-size 384",
            ["384", "--zero-quantized-gradients-code gaussian", "multiple of 256"],
        ),
        (f"--zero-stage 2 {DIFFERENCES} --zero-quantized-weight-differences-bits 8", ["-differences-bits 8", "1, 2, 3 or 4"]),
        ("--zero-stage 2 --zero-quantized-weight-differences-bits 2", ["-differences-bits 2 changes nothing without", DIFFERENCES]),
        ("--zero-stage 3 --zero-quantized-gradients-code gaussian", ["-code gaussian changes nothing without --zero-quantized-gradients"]),
        (f"--zero-stage 3 {GAUSSIAN} --zero-quantized-gradients-inter-bits 16", ["-inter-bits 16", "code gaussian", "1, 2, 3 or 4"]),
        (f"--zero-stage 3 {GAUSSIAN} --zero-quantized-gradients-intra-bits 4", ["-intra-bits 4", "code gaussian", "choose 8, or leave it"]),
        (f"--zero-stage 3 {GAUSSIAN} --zero-quantized-gradients-rotation hadamard", ["-rotation hadamard", "code absmax", "leave one"]),
        (f"--zero-stage 3 {GAUSSIAN} --zero-quantized-gradients-rounding stochastic", ["-rounding stochastic", "absmax", "leave one"]),
        (
            "--zero-stage 3 --zero-quantized-gradients --zero-quantized-gradients-inter-bits 3",
            ["-inter-bits 3", "-code gaussian", "4, 8 or 16"],
        ),
        (f"--zero-stage 0 {SUMS}", [SUMS, "--zero-stage 0", "choose --zero-stage 2 or 3"]),
        (f"--zero-stage 1 {SUMS}", [SUMS, "--zero-stage 1", "choose --zero-stage 2 or 3"]),
    ],
)
def test_a_broken_rule_names_flag_value_and_remedy(flags: str, words: list[str]) -> None:
    with pytest.raises(FlagError) as error:
        resolved(flags)
    text = str(error.value)
    assert all(word in text for word in words) and text.endswith("."), text


@pytest.mark.parametrize("flags", [f"--zero-stage 2 {DIFFERENCES}", f"--zero-stage 3 {GAUSSIAN}", "--zeropp lean"])
def test_gaussian_codes_cross_between_any_number_of_partitions(flags: str) -> None:
    assert resolved(f"{flags} --global-batch-size 8192", (8192, 2)).zero.zero_stage >= 2


def test_nodes_of_one_rank_keep_no_divided_copy_and_stage_2_is_the_remedy() -> None:
    with pytest.raises(FlagError, match=r"each node has one rank; choose --zero-stage 2, which keeps all weights on every rank\.$"):
        resolved(f"--zero-stage 3 {DIFFERENCES}", (3, 1))
    assert resolved(f"--zero-stage 2 {DIFFERENCES}", (3, 1)).zero.zero_quantized_weight_differences


def test_one_rank_alone_accepts_differences_in_every_stage_and_says_that_nothing_crosses_a_link() -> None:
    for stage in (1, 2, 3):
        assert resolved(f"--zero-stage {stage} {DIFFERENCES}", (1, 1)).notices == (
            f"{DIFFERENCES}: there is one rank, so nothing crosses a link, is quantized or kept as a copy",
        )


@pytest.mark.parametrize(
    "flags, notices",
    [
        (DIFFERENCES, ["no differences"]),
        (GAUSSIAN, ["carries quantized values"]),
        (f"{GAUSSIAN} {DIFFERENCES}", ["carries quantized values", "no differences"]),
    ],
)
def test_one_node_is_told_that_it_sends_no_differences(flags: str, notices: list[str]) -> None:
    lines = {
        "carries quantized values": "--zero-quantized-gradients: there is one node, so only the link inside it carries quantized values",
        "no differences": f"{DIFFERENCES}: there is one node, so no differences are sent; weights cross the link inside it in the working "
        "precision",
    }
    assert list(resolved(f"--zero-stage 2 {flags}", (4, 4)).notices) == [lines[notice] for notice in notices]


def test_partitions_smaller_than_the_one_node_send_differences() -> None:
    assert resolved(f"--zero-stage 3 {DIFFERENCES} --zero-hpz-partition-size 2", (4, 4)).notices == ()


@pytest.mark.parametrize("block", [256, 512])
def test_blocks_of_a_multiple_of_256_suit_gaussian_codes(block: int) -> None:
    assert resolved(f"--zero-stage 2 {DIFFERENCES} {GAUSSIAN} --quantization-block-size {block}").zero.quantization_block_size == block


@pytest.mark.parametrize("stage", [2, 3])
def test_sums_inside_partitions_need_no_quantization(stage: int) -> None:
    assert resolved(f"--zero-stage {stage} {SUMS} --global-batch-size 8").zero.zero_gradients_between_microbatches == "secondary"
