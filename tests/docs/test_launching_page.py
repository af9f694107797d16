"""docs/launching.md: what it says about NCCL is what a run gives it."""

from __future__ import annotations

import re

import pytest
from harness.pages import text_of

from megatron_zpp.parallel.communicators import MEBIBYTE, WORLD_CTAS, Communicator, communicators, lane_ctas
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import CONTEXT_ACROSS, LANES, TENSOR_ACROSS, Lane

pytestmark = pytest.mark.pure

PAGE = text_of("docs/launching.md")
WITH_BOTH = Grid.of_nodes(2, 8, 2, 4)
WITH_CONTEXT = Grid.of_nodes(2, 8, 1, 4)


def test_the_limits_of_nccl_are_those_of_the_page() -> None:
    table = PAGE.split("### Limits of NCCL")[1].split("\n## ")[0]
    in_page = [int(number) for number in re.findall(r"\| (\d+) \|$", table, re.MULTILINE)]
    assert in_page == [lane_ctas(WITH_BOTH, lane) for lane in (TENSOR_ACROSS, LANES[-1], CONTEXT_ACROSS)] + [WORLD_CTAS]
    assert f"At most {sum(one.ctas for one in communicators(WITH_BOTH))} are occupied" in table


def test_the_buffers_of_exchanges_are_those_of_the_page() -> None:
    def of_another_rank(grid: Grid, lane: Lane) -> str:
        two, three = (Communicator(peers, 0, lane_ctas(grid, lane), exchanges=True, gathers=False) for peers in (1, 2))
        return f"{(three.buffer_bytes() - two.buffer_bytes()) // MEBIBYTE} MiB"

    text = PAGE.replace("\n", " ")
    assert f"that of gradients inside a node takes {of_another_rank(WITH_BOTH, LANES[-1])}" in text
    assert f"that of ranks that share layers {of_another_rank(WITH_BOTH, TENSOR_ACROSS)}" in text
    assert f"divide samples takes {of_another_rank(WITH_CONTEXT, CONTEXT_ACROSS)} for each other one on the node" in text
    assert f"and {of_another_rank(WITH_BOTH, CONTEXT_ACROSS)} if ranks share layers as well" in text
