"""Lines from one rank for all."""

from datetime import datetime

import pytest

from megatron_zpp.monitor.logging import RankPrinter


@pytest.mark.parametrize("rank, printed", [(0, "first\n"), (1, ""), (2, "last\n")])
def test_each_line_comes_from_the_rank_it_names(rank, printed, capsys):
    printer = RankPrinter(rank, 3)
    printer.on_first("first")
    printer.on_last("last")
    assert capsys.readouterr().out == printed


def test_single_rank_is_first_and_last(capsys):
    printer = RankPrinter(0, 1)
    printer.on_first("first")
    printer.on_last("last")
    assert capsys.readouterr().out == "first\nlast\n"


def test_milestone_carries_the_time_in_megatrons_words(capsys):
    RankPrinter(0, 1, now=lambda: datetime(2026, 8, 3, 4, 5, 6)).milestone("after dataloaders are built")
    RankPrinter(1, 2).milestone("not on this rank")
    assert capsys.readouterr().out == "[after dataloaders are built] datetime: 2026-08-03 04:05:06 \n"
