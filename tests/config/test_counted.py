"""Numbers of things, in words."""

from __future__ import annotations

from megatron_zpp.config.counted import counted


def test_only_one_thing_is_named_in_the_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [counted(number, "corpus is", "corpora are") for number in (0, 1, 2)] == ["0 corpora are", "1 corpus is", "2 corpora are"]
