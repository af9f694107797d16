"""The host link on streams of the model machine: order, slots, and copies beside computation."""

from __future__ import annotations

import pytest
import torch
from harness.fake_streams.accesses import Accesses, RaceError, watched_memory
from harness.fake_streams.machine import Machine
from torch import Tensor

from megatron_zpp.comm.code import SliceShape
from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.host_link import SLOTS, HostLink

pytestmark = pytest.mark.pure

SHAPE = SliceShape(32, 16)
LONG = 100.0  # of a computation, in the machine's time; copies take none


def values_of(number: int, slice_shape: SliceShape = SHAPE) -> Regions:
    return Regions.of(torch.full((slice_shape.numel,), float(number)), slice_shape)


def test_values_arrive_one_after_the_other_in_two_places_while_the_device_computes() -> None:
    machine = Machine()
    with watched_memory(), Accesses(machine):
        link, units = HostLink(machine), [values_of(number) for number in range(5)]
        arrivals = link.arrivals(units)
        machine.synchronize()  # as the host waits for the gradient norm
        machine.spend(LONG)
        arrivals[0].start()
        for number, arrival in enumerate(arrivals):
            for coming in arrivals[number + 1 : number + 2]:
                coming.start()
            arrival.wait()
            assert all(part.eq(number).all() for part in arrival.values.parts())
        assert machine.host_time < LONG and link.crossings == 5
        assert len({arrival.values.blocks.untyped_storage().data_ptr() for arrival in arrivals}) == SLOTS
        assert link.pinned_bytes == SLOTS * 4 * SHAPE.numel
        machine.synchronize()


def test_values_that_the_host_has_not_waited_for_are_not_copied_unnoticed() -> None:
    machine = Machine()
    with watched_memory(), Accesses(machine):
        (arrival,) = HostLink(machine).arrivals([values_of(1)])
        with pytest.raises(RaceError):
            arrival.start()
        machine.synchronize()


def test_a_place_that_the_host_reads_before_the_copy_has_ended_is_noticed() -> None:
    machine = Machine()
    with watched_memory(), Accesses(machine):
        (arrival,) = HostLink(machine).arrivals([values_of(1)])
        machine.synchronize()
        arrival.start()
        with pytest.raises(RaceError):
            arrival.values.blocks.sum()
        machine.synchronize()


def test_payloads_are_encoded_in_places_from_which_the_device_has_copied_and_come_up_beside_computation() -> None:
    machine = Machine()
    with watched_memory(), Accesses(machine):
        link, payloads = HostLink(machine), [torch.zeros(1, nbytes, dtype=torch.uint8) for nbytes in (64, 32, 64, 48)]
        link.reserve(64)
        machine.synchronize()
        lane = machine.make(is_urgent=True)
        machine.spend(LONG)
        with machine.entered(lane):
            for number, payload in enumerate(payloads):
                link.encode(lambda written, number=number: _fill(written, number), payload)  # type: ignore[misc]
        assert machine.host_time < LONG and lane.free_at < LONG
        assert link.pinned_bytes == SLOTS * 64 and link.crossings == len(payloads)
        machine.synchronize()
        assert [int(payload.unique()) for payload in payloads] == [0, 1, 2, 3]


def _fill(written: Tensor, number: int) -> None:
    written.fill_(number)


def test_units_of_different_sizes_share_places_of_the_largest() -> None:
    machine = Machine()
    with watched_memory(), Accesses(machine):
        link = HostLink(machine)
        link.arrivals([values_of(0, SliceShape(numel, 16)) for numel in (16, 64, 32, 48)])
        assert link.pinned_bytes == 4 * ((32 + 16) + (64 + 16))
        machine.synchronize()


def test_a_link_without_streams_hands_over_values_and_payloads_as_they_are() -> None:
    link, values, payload = HostLink(None), values_of(3), torch.zeros(1, 16, dtype=torch.uint8)
    (arrival,) = link.arrivals([values])
    arrival.start()
    arrival.wait()
    link.encode(lambda written: _fill(written, 7), payload)
    assert arrival.values is values and payload.eq(7).all()
    assert not link.copies and link.pinned_bytes == link.crossings == 0
