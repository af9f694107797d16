"""docs/flags.md."""

from pathlib import Path

from megatron_zpp.config.flags_page import flags_page
from megatron_zpp.config.obsolete import ACCEPTED, ACCEPTED_FAMILIES, REFUSED, REFUSED_FAMILIES
from megatron_zpp.config.options import options

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_page_in_docs_is_current():
    assert PAGE.read_text() == flags_page(), "run: python -m megatron_zpp.config.flags_page > docs/flags.md"


def test_page_has_a_row_for_every_flag():
    rows = {line.split("`")[1] for line in flags_page().splitlines() if line.startswith("| `")}
    families = {f"{prefix}*" for prefix in (*ACCEPTED_FAMILIES, *REFUSED_FAMILIES)}
    assert rows == {option.spelling for option in options()} | {*ACCEPTED, *REFUSED} | families


def test_every_table_is_rectangular():
    widths = [line.count(" | ") for line in flags_page().splitlines() if line.startswith("| ")]
    assert set(widths) == {2, 1}
