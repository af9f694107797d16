"""Numbers that no run can mean are refused by one sentence, whatever else is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import LARGEST_TOKENS, FlagError, divisors, whole_number
from megatron_zpp.config.options import Option, options
from megatron_zpp.config.resolve import resolve

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 2".split()
NUMBERS = [option for option in options() if option.kind in (int, float) and not isinstance(option.flag.allowed, tuple)]


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.name)
def test_an_enormous_number_is_refused_with_its_flag_and_the_largest(option: Option) -> None:
    for text in (str(2**63), str(10**30), str(10**400)) if option.kind is int else ("1e39", "1e300", "1e400"):
        with pytest.raises(FlagError, match=rf"^{option.spelling} .* is out of range; choose a value that is .*(at most|below)"):
            parse_flags([*SHAPE, option.spelling, text])


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--num-layers 1000000", "--num-layers 1000000 is out of range; choose a value that is at least 1 and at most 2048."),
        ("--num-layers 0", "--num-layers 0 is out of range; choose a value that is at least 1."),
        ("--train-iters 1000000000000 --global-batch-size 1000", "are 1000000000000000 samples, more than 1099511627776"),
        ("--train-iters 100000000000 --eval-interval 1", "100000000001 validations of --eval-iters 100 times 1 samples are 10000000000100"),
        (
            "--global-batch-size 1000000 --rampup-batch-size 1 1 99999",
            "has 999999 steps to --global-batch-size 1000000, more than 65536",
        ),
        ("--global-batch-size 8 --rampup-batch-size 1 1 9999999999999", "has a value above 1099511627776"),
        ("--step-batch-size-schedule 0:1e999999999", "has the pair 0:1e999999999; give pairs"),
        ("--step-batch-size-schedule 0:1e15", "no size above 1099511627776"),
        ("--iterations-to-skip " + "9" * 5000, "give iterations from 1 on"),
        ("--profile --profile-dir d --profile-ranks \u00b2", "is not a rank of this world"),
    ],
)
def test_the_error_names_value_and_rule(flags: str, sentence: str) -> None:
    with pytest.raises(FlagError) as raised:
        resolve(parse_flags([*SHAPE, *flags.split()]), 1, 1)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ["1e400", "1" + "0" * 400, "-1e400"])
def test_an_enormous_number_in_the_deepspeed_json_is_refused(tmp_path: Path, value: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(f'{{"gradient_clipping": {value}}}')
    with pytest.raises(FlagError, match=r"gradient_clipping must be a finite number below 2\^63, not .*; "):
        resolve(parse_flags([*SHAPE, "--deepspeed_config", str(file)]), 1, 1)


@given(st.integers(1, 10**6))
def test_divisors_are_all_divisors(number: int) -> None:
    found = divisors(number)
    assert found == sorted({number // divisor for divisor in found})
    assert [candidate for candidate in range(1, 1001) if number % candidate == 0] == [divisor for divisor in found if divisor <= 1000]


@pytest.mark.parametrize("text, number", [("0", 0), ("007", 7), (str(LARGEST_TOKENS), LARGEST_TOKENS)])
def test_plain_digits_are_a_whole_number(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1_0", "1.0", "\u00b2", "\u0663", "\uff12", str(LARGEST_TOKENS + 1), "9" * 5000])
def test_any_other_text_is_none(text: str) -> None:
    assert whole_number(text) is None
