"""docs/worked_example.md: its blocks are what the program prints, and what plain fractions give by the formulas of docs/numerics.md."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

import pytest
from harness.example_runs import output_of_example
from harness.places import ROOT

PAGE = (ROOT / "docs" / "worked_example.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```text\n(\S.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
TEXT = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL).replace("\n", " ")
EQUATIONS = re.findall(r"(?<![\w.])(\(?-?\d[\d.x/+() -]*?) = (-?\d+(?:\.\d+)?(?:/\d+)?)", TEXT)
FP32, BF16 = 24, 8  # bits of a significand
SLICE_OF = (0, 2, 1, 3)
COLUMNS, NODES = ((0, 2), (1, 3)), ((0, 1), (2, 3))
LEARNING_RATE, WEIGHT_DECAY, EPSILON = Fraction("0.1"), Fraction("0.01"), Fraction("1e-8")

Values = list[Fraction]


def block(number: int) -> list[list[str]]:
    """The cells of the page's block with this number, row by row, without the names of its columns."""
    lines = next(text for text in BLOCKS if text.startswith(f"{number}  ")).splitlines()
    return [line.split() for line in lines[2:]]


def given(number: int) -> dict[tuple[int, int], Values]:
    """By rank and slice what stands in a block that nothing above it decides."""
    return {(int(rank), int(index)): [Fraction(value) for value in values] for rank, index, *values in block(number)}


def rounded(value: Fraction, bits: int) -> Fraction:
    if value == 0:
        return value
    step = Fraction(2) ** (math.frexp(value)[1] - bits)
    return round(value / step) * step  # halves to even


def written(values: Sequence[Fraction]) -> list[str]:
    return [f"{float(value):.7g}" for value in values]


class Coded:
    """The codes and the scale of one slice, and the values that they stand for."""

    def __init__(self, values: Values, bits: int) -> None:
        self.bits = bits
        self.scale = rounded(max(map(abs, values)) / (2 ** (bits - 1) - 1), FP32)
        self.codes = [round(value / self.scale) if self.scale else 0 for value in values]
        self.decoded = [rounded(code * self.scale, FP32) for code in self.codes]

    def cells(self) -> list[str]:
        digits = [code % 2**self.bits for code in self.codes] + [0] * 29
        if self.bits == 4:
            digits = [low + 16 * high for low, high in zip(digits[0::2], digits[1::2], strict=True)]
        shown = 3 * self.bits // 8 + (self.bits == 4)
        codes = [f"{digit:02x}" for digit in digits[:shown]]
        return [*map(str, self.codes), *written([self.scale]), *codes, f"+{len(digits) - shown}", "|", *self._scale_bytes(), "+12"]

    def _scale_bytes(self) -> list[str]:
        """Sign, exponent and significand of fp32, the lowest byte first."""
        exponent = math.frexp(self.scale)[1] - 1
        significand = int(self.scale / Fraction(2) ** (exponent - 23)) - 2**23
        number = ((exponent + 127) << 23) + significand if self.scale else 0
        return [f"{byte:02x}" for byte in number.to_bytes(4, "little")]


def mean(first: Coded, second: Coded) -> Values:
    return [rounded(a + b, FP32) / 2 for a, b in zip(first.decoded, second.decoded, strict=True)]


MAIN = {index: [rounded(value, FP32) for value in values] for (_, index), values in given(1).items()}
GRADIENTS = given(5)
UP = {index: Coded(values, 8) for index, values in MAIN.items()}
DOWN = {place: Coded(values, 4) for place, values in GRADIENTS.items()}
OF_NODE = {(node, index): mean(*(DOWN[rank, index] for rank in NODES[node])) for node in range(2) for index in range(4)}
ACROSS = {place: Coded(values, 4) for place, values in OF_NODE.items()}
MEAN = {index: mean(ACROSS[0, index], ACROSS[1, index]) for index in range(4)}


@pytest.mark.virtual
def test_the_blocks_of_the_page_are_what_the_program_prints() -> None:
    assert "\n\n".join(BLOCKS) + "\n" == output_of_example("one_unit")


def test_each_rank_owns_the_slice_that_is_drawn() -> None:
    drawn = [(int(rank), int(index)) for rank, index in re.findall(r"rank (\d) \[slice (\d)\]", PAGE)]
    assert drawn == list(enumerate(SLICE_OF)) == list(given(1))


def test_weights_climb_as_codes_and_scales_of_the_formula() -> None:
    assert block(2) == [[str(rank), str(index), *UP[index].cells()] for rank, index in enumerate(SLICE_OF)]
    assert block(3) == [[str(rank), str(SLICE_OF[other]), *UP[SLICE_OF[other]].cells()] for rank in range(4) for other in COLUMNS[rank % 2]]


def test_the_model_sees_code_times_scale_rounded_to_bf16() -> None:
    for row, (index, main) in zip(block(4), sorted(MAIN.items()), strict=True):
        seen = [rounded(value, BF16) for value in UP[index].decoded]
        errors = [rounded(value - exact, FP32) for value, exact in zip(seen, main, strict=True)]
        assert row == [str(index), *written(seen), *written(errors)]


def test_gradients_descend_as_codes_of_values_and_then_of_means() -> None:
    assert block(6) == [
        [str(rank), str(NODES[rank // 2][index // 2]), str(index), *DOWN[rank, index].cells()] for rank in range(4) for index in range(4)
    ]
    assert block(7) == [
        [str(rank), str(to), str(SLICE_OF[to]), *written(OF_NODE[rank // 2, SLICE_OF[to]]), *ACROSS[rank // 2, SLICE_OF[to]].cells()]
        for rank in range(4)
        for to in COLUMNS[rank % 2]
    ]


def test_owners_have_the_mean_of_the_means_and_all_ranks_its_norm() -> None:
    true = {index: [sum(of_ranks) / 4 for of_ranks in zip(*(GRADIENTS[rank, index] for rank in range(4)), strict=True)] for index in MEAN}
    assert block(8) == [[str(rank), str(index), *written(MEAN[index]), *written(true[index])] for rank, index in enumerate(SLICE_OF)]
    norm = math.sqrt(sum(value * value for values in MEAN.values() for value in values))
    assert f"norm, the same on ranks 0 1 2 3: {norm:.7g}" in BLOCKS


def test_weights_decay_and_move_by_the_rate_against_the_sign_of_the_gradient() -> None:
    for (_, index), weights in given(9).items():
        moved = [
            weight * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE * gradient / (abs(gradient) + EPSILON)
            for weight, gradient in zip(MAIN[index], MEAN[index], strict=True)
        ]
        # Weights are below 4, where fp32 numbers are 2.4e-7 apart; two roundings of half of it, and the seventh digit of the page.
        assert [float(value) for value in weights] == pytest.approx([float(value) for value in moved], abs=1e-6)


def test_a_rank_receives_the_payloads_that_others_sent() -> None:
    up, down, uncoded = 32 + 16, 16 + 16, 2 * 32
    slices = {"up between": (1, up), "up inside": (2, up), "down inside": (2, down), "down between": (1, down)}
    assert block(10) == [
        [*hop.split(), *map(str, (number * size, number * (size - 16), number * 16, number * uncoded, size / uncoded))]
        for hop, (number, size) in slices.items()
    ]


def test_the_equations_in_the_text_hold() -> None:
    assert len(EQUATIONS) > 15
    for left, right in EQUATIONS:
        value, said = (eval(side.replace("x", "*")) for side in (left, right))  # both have digits and signs alone
        digits = len(right.partition(".")[2])
        assert value == said or (abs(value - said) <= 0.5000001 * 10.0**-digits and "." in right), (left, right)


def test_every_decimal_number_of_the_text_stands_in_a_block_or_in_an_equation() -> None:
    known = {
        *" ".join(BLOCKS).split(),
        *" ".join(side for equation in EQUATIONS for side in equation).replace("(", "").replace(")", "").split(),
    }
    in_fp32 = f"{float(rounded(Fraction('-0.3'), FP32)):.8g}"
    assert set(re.findall(r"-?\d+\.\d+", TEXT)) - known == {in_fp32}
