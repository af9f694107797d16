from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from megatron_zpp.comm.backend import VirtualBackend, VirtualWorld
from megatron_zpp.comm.codecs import CastCodec, LinkCodecs, Regions, SliceShape
from megatron_zpp.comm.lanes import ThreadLanes
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Climb, Links
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import Topology

pytestmark = pytest.mark.virtual

SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (1, 4), (4, 1)]
SHAPE = SliceShape(blocks=5, exact=3)
EXACT = CastCodec(torch.float32)


def _on_every_rank(shape: tuple[int, int], program: Callable[[Links], Tensor]) -> list[Tensor]:
    def run(backend: VirtualBackend) -> Tensor:
        return program(Links(backend, ThreadLanes(), Ledger(backend.grid, backend.rank), torch.device("cpu")))

    return cast(list[Tensor], VirtualWorld(Grid.of_nodes(*shape)).run(run))


def _climb(own: Regions) -> Climb:
    return Climb("unit", SHAPE, LinkCodecs(EXACT, EXACT), lambda payload: EXACT.encode_into(own, payload))


def _whole(world_size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """The flat unit of `world_size` slices: all blocks slice_shape, then all exact slice_shape."""
    return torch.randn(world_size * SHAPE.numel, generator=torch.Generator().manual_seed(seed)) * scale


def _cut(flat: Tensor, world_size: int, first: int, slices: int) -> Tensor:
    """Slices [first, first + slices) of the flat unit as a flat buffer of their own, by plain indexing."""
    blocks = flat[: world_size * SHAPE.blocks].view(world_size, -1)[first : first + slices]
    exact = flat[world_size * SHAPE.blocks :].view(world_size, -1)[first : first + slices]
    return torch.cat([blocks.flatten(), exact.flatten()])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_two_climbs_bring_every_rank_the_whole_unit_in_slice_order(shape: tuple[int, int]) -> None:
    world_size = shape[0] * shape[1]

    def program(links: Links) -> Tensor:
        own = Regions.of(_cut(_whole(world_size), world_size, links.own_slice, 1), SHAPE)
        payloads = torch.empty(links.partitions, EXACT.payload_bytes(SHAPE), dtype=torch.uint8)
        full = torch.empty(world_size * SHAPE.numel)
        hop = links.climb_to_secondary(_climb(own), payloads)
        links.lanes.wait(links.climb_to_full("unit", EXACT, payloads, Regions.of(full, SHAPE), hop))
        return full

    assert all(torch.equal(full, _whole(world_size)) for full in _on_every_rank(shape, program))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_climb_brings_the_run_of_slices_of_this_local_rank(shape: tuple[int, int]) -> None:
    world_size = shape[0] * shape[1]

    def program(links: Links) -> Tensor:
        own = Regions.of(_cut(_whole(world_size), world_size, links.own_slice, 1), SHAPE)
        payloads = torch.empty(links.partitions, EXACT.payload_bytes(SHAPE), dtype=torch.uint8)
        links.lanes.wait(links.climb_to_secondary(_climb(own), payloads))
        secondary = torch.empty(links.partitions * SHAPE.numel)
        EXACT.decode_into(payloads, Regions.of(secondary, SHAPE))
        return secondary

    for rank, secondary in enumerate(_on_every_rank(shape, program)):
        local_rank = rank % shape[1]
        assert torch.equal(secondary, _cut(_whole(world_size), world_size, local_rank * shape[0], shape[0]))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_descent_brings_the_mean_over_the_node_and_then_over_the_nodes_in_rank_order(shape: tuple[int, int], accumulate: bool) -> None:
    nodes, ranks_per_node = shape
    world_size = nodes * ranks_per_node

    def program(links: Links) -> Tensor:
        full = Regions.of(_whole(world_size, seed=links.backend.rank), SHAPE)
        primary = torch.full((SHAPE.numel,), 0.25)
        hops = links.descend("unit", LinkCodecs(EXACT, EXACT), full, Regions.of(primary, SHAPE), accumulate=accumulate)
        links.lanes.wait(hops[-1])
        return primary

    across = _ordered_mean(
        [_ordered_mean([_whole(world_size, node * ranks_per_node + j) for j in range(ranks_per_node)]) for node in range(nodes)]
    )
    topology = Topology.of_nodes(nodes, ranks_per_node)
    for rank, primary in enumerate(_on_every_rank(shape, program)):
        expected = _cut(across, world_size, topology.slice_of(rank), 1)
        assert torch.equal(primary, 0.25 + expected if accumulate else expected)


def _ordered_mean(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total = total + value
    return total / len(values)


@pytest.mark.parametrize("shape", SHAPES)
def test_descending_rung_by_rung_gives_the_same_bits_as_both_hops_in_one_job(shape: tuple[int, int]) -> None:
    world_size = shape[0] * shape[1]
    codecs = LinkCodecs(CastCodec(torch.bfloat16), CastCodec(torch.bfloat16))

    def program(links: Links) -> Tensor:
        full = Regions.of(_whole(world_size, seed=links.backend.rank).bfloat16(), SHAPE)
        once, stepwise = torch.zeros(SHAPE.numel), torch.zeros(SHAPE.numel)
        secondary = Regions.of(torch.zeros(links.partitions * SHAPE.numel), SHAPE)
        hops = links.descend("unit", codecs, full, Regions.of(once, SHAPE), accumulate=False)
        hop = links.descend_to_secondary("unit", codecs.intra, full, secondary, accumulate=False)
        hops.append(links.descend_from_secondary("unit", codecs.inter, secondary, Regions.of(stepwise, SHAPE), accumulate=False, after=hop))
        for each in hops:
            links.lanes.wait(each)
        return torch.stack([once, stepwise])

    assert all(torch.equal(*result) for result in _on_every_rank(shape, program))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (4, 4)])
def test_the_mean_of_large_fp16_gradients_does_not_overflow_on_either_hop(shape: tuple[int, int]) -> None:
    codec = CastCodec(torch.float16)

    def program(links: Links) -> Tensor:
        full = Regions.of(torch.full((links.topology.data_ranks * SHAPE.numel,), 60000.0, dtype=torch.float16), SHAPE)
        primary = torch.zeros(SHAPE.numel)
        links.lanes.wait(links.descend("unit", LinkCodecs(codec, codec), full, Regions.of(primary, SHAPE), accumulate=False)[-1])
        return primary

    assert all((primary == 60000.0).all() for primary in _on_every_rank(shape, program))


def test_buffers_of_finished_jobs_serve_the_next_ones() -> None:
    def program(links: Links) -> Tensor:
        allocated = []
        full = Regions.of(_whole(4), SHAPE)
        primary = Regions.of(torch.zeros(SHAPE.numel), SHAPE)
        for _ in range(5):
            links.lanes.wait(links.descend("unit", LinkCodecs(EXACT, EXACT), full, primary, accumulate=False)[-1])
            allocated.append(links.staging.allocated_bytes)
        return torch.tensor(allocated)

    for allocated in _on_every_rank((2, 2), program):
        assert (allocated == allocated[0]).all() and allocated[0] > 0
