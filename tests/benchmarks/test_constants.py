from __future__ import annotations

import constants
import pytest

from megatron_zpp.training.hardware import CONSTANTS, Constant

pytestmark = pytest.mark.pure


def test_the_table_has_a_row_for_every_speed_with_what_was_measured_here() -> None:
    table = constants._table({("cpu", "encoded"): 0.25e-9}).splitlines()[2:]
    assert [tuple(line.split(" | ")[:2]) for line in table] == [(f"| {constant.device}", constant.name) for constant in CONSTANTS]
    here = [line.split(" | ")[4] for line in table]
    assert here[0] == "0.25" and set(here[1:]) == {"-"}


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: f"{constant.device}: {constant.name}")
def test_every_speed_is_that_of_one_value_byte_or_collective_and_positive(constant: Constant) -> None:
    assert constant.seconds > 0 and constant.of.startswith(("value", "byte", "collective"))
    assert [(one.device, one.name) for one in CONSTANTS].count((constant.device, constant.name)) == 1
