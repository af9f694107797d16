"""The first message over every lane: in its stream, of its kind, alike on every rank, and an error that names the lane."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from harness.fake_streams.gpus import Gpu, run_on_gpus
from torch import Tensor

from megatron_zpp.comm import world_links
from megatron_zpp.comm.backend import Work
from megatron_zpp.comm.first_messages import send_first_messages
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import CONTEXT_ACROSS, LANES, TENSOR_ACROSS, Direction, Lane, Link
from megatron_zpp.training import setup
from megatron_zpp.training.instruments import make_instruments

pytestmark = pytest.mark.virtual

CPU = torch.device("cpu")
GRIDS = [
    *(Grid.of_nodes(*shape) for shape in [(1, 1), (1, 3), (3, 1), (2, 2)]),
    Grid(8, 4, 2, tensor_ranks=2),
    Grid(8, 4, 2, 2, context_ranks=2),
]


class Listener:
    """A backend that notes each collective and the stream in which it is enqueued. broken: a lane whose link fails."""

    def __init__(self, gpu: Gpu, broken: Lane | None = None) -> None:
        self.grid = gpu.backend.grid
        self.rank = gpu.backend.rank
        self.heard: list[tuple[str, Lane | None, str]] = []
        self._gpu = gpu
        self._broken = broken

    def all_gather(self, lane: Lane, output: Tensor, own: Tensor) -> Work | None:
        self._note("all_gather", lane)
        return self._gpu.backend.all_gather(lane, output, own)

    def exchange(self, lane: Lane, output: Tensor, sent: Tensor) -> Work | None:
        self._note("exchange", lane)
        return self._gpu.backend.exchange(lane, output, sent)

    def gather_world(self, own: Tensor) -> Tensor:
        self._note("gather_world", None)
        return self._gpu.backend.gather_world(own)

    def _note(self, kind: str, lane: Lane | None) -> None:
        if lane is not None and lane == self._broken:
            raise RuntimeError("NCCL error: unhandled system error")
        self.heard.append((kind, lane, self._gpu.machine.current().name))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_lane_with_company_carries_a_message_of_its_kind_in_its_stream_and_all_have_arrived_at_the_end(grid: Grid) -> None:
    def program(gpu: Gpu) -> list[tuple[str, Lane | None, str]]:
        listener = Listener(gpu)
        send_first_messages(listener, gpu.lanes, CPU)
        assert gpu.machine.unfinished() == []
        return listener.heard

    heard_by = run_on_gpus(grid, program)
    used = [lane for lane in LANES if grid.ladder.link_ranks(lane.link) > 1]
    kinds = ["all_gather" if lane.direction is Direction.CLIMB else "exchange" for lane in used]
    expected = [("gather_world", None), *zip(kinds, used, strict=True)] if grid.world_size > 1 else []
    expected += [("all_gather", TENSOR_ACROSS), ("exchange", TENSOR_ACROSS)] if grid.tensor_ranks > 1 else []
    expected += [("exchange", CONTEXT_ACROSS)] if grid.context_ranks > 1 else []
    assert all([(kind, lane) for kind, lane, _ in heard] == expected for heard in heard_by)
    streams = [stream for _, lane, stream in heard_by[0] if lane in LANES]
    assert len(set(streams)) == len(streams) and all(stream.startswith("urgent") for stream in streams)


def test_a_tensor_link_that_cannot_be_connected_is_named_with_its_ranks() -> None:
    def program(gpu: Gpu) -> None:
        send_first_messages(Listener(gpu, TENSOR_ACROSS), gpu.lanes, CPU)

    with pytest.raises(
        RuntimeError, match=r"^the tensor link: (ranks 0, 1|ranks 2, 3) could not exchange a first message; NCCL_DEBUG=INFO"
    ):
        run_on_gpus(Grid.of_nodes(2, 2, 2), program)


def test_ranks_of_an_island_are_named_as_ranks_of_the_world() -> None:
    def program(gpu: Gpu) -> None:
        send_first_messages(Listener(gpu, TENSOR_ACROSS), gpu.lanes, CPU, range(8, 12))

    with pytest.raises(RuntimeError, match=r"^the tensor link: (ranks 8, 9|ranks 10, 11) could not"):
        run_on_gpus(Grid.of_nodes(2, 2, 2), program)


@pytest.mark.parametrize("link", [Link.INTER, Link.INTRA])
def test_a_lane_that_cannot_be_connected_is_named_with_its_ranks_and_what_to_try(link: Link) -> None:
    broken = Lane(link, Direction.DESCEND)

    def program(gpu: Gpu) -> None:
        send_first_messages(Listener(gpu, broken), gpu.lanes, CPU)

    ranks = {Link.INTER: "ranks 0, 2|ranks 1, 3", Link.INTRA: "ranks 0, 1|ranks 2, 3"}[link]
    with pytest.raises(RuntimeError, match=rf"^lane {broken}: ({ranks}) could not exchange a first message; NCCL_DEBUG=INFO.*system error"):
        run_on_gpus((2, 2), program)


class FakeWorld:
    rank, world_size, collective_timeout = 0, 2, timedelta(minutes=1)

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def check_others(self) -> None:
        """Finds nobody lost."""

    def connecting(self) -> None:
        """Is not called, as no group is made."""


def connect_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets rank 0 of two make links without process groups: a pair of its lanes and waits."""
    monkeypatch.setattr(world_links, "has_world", lambda: True)
    monkeypatch.setattr(world_links.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(world_links, "make_lane_groups", lambda *arguments: {})
    monkeypatch.setattr(world_links, "Links", lambda backend, lanes, ledger, device, waits: (lanes, waits))


@pytest.mark.parametrize("flags", ["", "--timing-log-level 2"])
def test_the_tensor_link_of_a_run_watches_the_others_and_tells_its_timers_of_waits_if_they_run(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_nobody(monkeypatch)
    config = resolve(parse_flags(f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 {flags}".split()), 2, 2)
    instruments, world = make_instruments(config, CPU, 0), FakeWorld("cpu")
    _, waits = cast(tuple[Any, ...], setup.build_links(config, cast(Any, world), instruments))
    assert waits.watch == world.check_others
    assert (waits.observer is instruments.observer) == bool(flags)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_connects_its_lanes_when_it_builds_them_if_it_is_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    world: Any = FakeWorld(device)
    connect_nobody(monkeypatch)
    monkeypatch.setattr(world_links, "streams_of", lambda device: None if device.type == "cpu" else "streams")
    monkeypatch.setattr(world_links, "make_lanes", lambda streams, watch: f"lanes on {streams}")
    monkeypatch.setattr(world_links, "send_first_messages", lambda *arguments: calls.append(arguments))
    config = resolve(parse_flags("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16".split()), 2, 2)
    setup.build_links(config, world, make_instruments(config, CPU, 0))
    assert [arguments[1:] for arguments in calls] == ([("lanes on streams", world.device, range(2))] if device == "cuda" else [])
