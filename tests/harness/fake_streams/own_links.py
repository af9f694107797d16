"""Links that shard() and join_islands() make, on the machine of the rank that makes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from harness.fake_streams.machine import Machine
from harness.worlds import TurnLanes
from megatron_zpp.comm import world_links
from megatron_zpp.comm.lanes import StreamLanes
from megatron_zpp.comm.links import Links

_of_thread = threading.local()


def put_rank_on(machine: Machine | None) -> None:
    """The rank of this thread has the streams of this machine; None: it has none."""
    _of_thread.machine = machine


@contextmanager
def links_on_machines() -> Iterator[None]:
    """A block in which every rank calls `put_rank_on` before its links are made."""

    def make_lanes(_: Any) -> Any:
        return TurnLanes() if _of_thread.machine is None else StreamLanes(_of_thread.machine)

    def make_links(*parts: Any, **others: Any) -> Links:
        return Links(*parts, streams=_of_thread.machine, **others)

    with ExitStack() as stack:
        stack.enter_context(patch.object(world_links, "make_lanes", make_lanes))
        stack.enter_context(patch.object(world_links, "Links", make_links))
        yield
