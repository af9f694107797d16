"""Places of kept inputs: their bytes, whose values are in them, and copies to the host on streams of a model machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from harness.fake_streams.accesses import Accesses, RaceError, watched_memory
from harness.fake_streams.machine import FakeStream, Machine, Site
from harness.fake_streams.sources import ordering_lines
from harness.live_bytes import LiveBytes
from torch import Tensor

from megatron_zpp.comm.kept_places import Arena, HostPlaces, Kept, Places, make_places

CPU = torch.device("cpu")
CHUNKS, NUMEL = 4, 32
COPY, PRODUCT = 3.0, 5.0


def values(number: int) -> Tensor:
    return torch.full((NUMEL,), float(number))


def test_an_arena_takes_its_bytes_when_it_is_made_and_none_later() -> None:
    with LiveBytes() as live:
        arena = Arena(CHUNKS, NUMEL, torch.bfloat16, CPU)
        assert live.now == arena.nbytes == CHUNKS * NUMEL * 2
        for number in range(CHUNKS):
            arena.keep(number, values(number).bfloat16())
        assert live.now == arena.nbytes


@pytest.mark.parametrize("numel", [NUMEL, NUMEL - 5])
def test_every_place_gives_back_what_it_was_given(numel: int) -> None:
    arena = Arena(CHUNKS, NUMEL, torch.float32, CPU)
    kept = [arena.keep(number, values(number)[:numel]) for number in range(CHUNKS)]
    assert all(torch.equal(kept[number].values(), values(number)[:numel]) for number in reversed(range(CHUNKS)))


def test_values_that_do_not_fit_their_place_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="place 1 has 32 elements, too few for 33"):
        Arena(CHUNKS, NUMEL, torch.float32, CPU).keep(1, torch.zeros(NUMEL + 1))


@pytest.mark.parametrize("is_on_host", [False, True])
def test_values_that_a_later_forward_has_overwritten_are_an_error_and_never_those_of_the_later_one(is_on_host: bool) -> None:
    machine = Machine()
    with Accesses(machine):
        places = make_places(CHUNKS, NUMEL, torch.float32, CPU, streams=machine, on_host=is_on_host)
        older, newer = places.keep(2, values(1)), places.keep(2, values(2))
        with pytest.raises(RuntimeError, match="place 2 were overwritten by a later forward"):
            older.values()
        assert torch.equal(newer.values(), values(2))
        machine.synchronize()


def test_a_device_without_streams_keeps_values_of_the_host_in_an_arena() -> None:
    assert isinstance(make_places(1, 1, torch.float32, CPU, streams=None, on_host=True), Arena)


# ---- on streams


def on_host(machine: Machine) -> HostPlaces:
    return HostPlaces(CHUNKS, NUMEL, torch.float32, CPU, machine)


def forward(places: Places, number: int) -> tuple[list[Kept], Tensor]:
    """Computes and frees one input after the other."""
    hidden, kept = values(number) * 1.0, []
    for chunk in range(CHUNKS):
        kept.append(places.keep(chunk, hidden))
        hidden = hidden + 1.0
    return kept, hidden


def program(machine: Machine) -> list[float]:
    """Three forwards and backwards, copying one chunk ahead."""
    places, found = on_host(machine), []
    for number in range(3):
        kept, gradient = forward(places, number)
        for chunk in reversed(range(CHUNKS)):
            value = kept[chunk].values()
            if chunk > 0:
                kept[chunk - 1].start()
            gradient = gradient * value
            found.append(value.sum())
            del value
    totals: list[float] = torch.stack(found).tolist()
    machine.synchronize()
    return totals


def run(without: Site | None = None) -> Machine:
    machine = Machine(without)
    with watched_memory(), Accesses(machine):
        found = program(machine)
        expected = [NUMEL * float(number + chunk) for number in range(3) for chunk in reversed(range(CHUNKS))]
        assert found == expected
        assert not machine.unfinished()
    return machine


@cache
def needed() -> frozenset[Site]:
    return frozenset(site for site in run().needed if site.file == "kept_places.py")


def test_no_two_accesses_lack_an_order_and_every_line_that_waits_or_records_is_needed() -> None:
    assert needed() == ordering_lines()["kept_places.py"] and len(needed()) == 6


@pytest.mark.parametrize("index", range(6))
def test_each_wait_is_missed_when_it_has_no_effect(index: int) -> None:
    site = sorted(needed(), key=str)[index]
    with pytest.raises(RaceError):
        run(site)


def test_the_host_memory_is_pinned_once() -> None:
    machine = Machine()
    with Accesses(machine):
        assert on_host(machine).nbytes == CHUNKS * NUMEL * 4


def test_on_the_device_there_are_one_value_that_leaves_and_two_that_return() -> None:
    places = on_host(Machine())
    with LiveBytes() as live:
        kept, last = forward(places, 1)
        del last
        assert live.now == NUMEL * 4
    with LiveBytes() as live:
        for chunk in reversed(range(CHUNKS)):
            value = kept[chunk].values()
            if chunk > 0:
                kept[chunk - 1].start()
            del value
        assert (live.now, live.peak) == (0, 2 * NUMEL * 4)


class TimedCopies(Machine):
    """Copies take COPY."""

    @contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        with super().entered(stream):
            self.spend(COPY)
            yield


def test_copies_run_beside_computation_but_for_the_first_one_up() -> None:
    machine = TimedCopies()
    with Accesses(machine):
        places, kept = on_host(machine), []
        for chunk in range(CHUNKS):
            kept.append(places.keep(chunk, values(chunk)))
            machine.spend(PRODUCT)
        for chunk in reversed(range(CHUNKS)):
            kept[chunk].values()
            if chunk > 0:
                kept[chunk - 1].start()
            machine.spend(PRODUCT)
        so_far = machine.host_time
        machine.synchronize()
    assert machine.compute.free_at == 2 * CHUNKS * PRODUCT + COPY
    assert so_far == 0.0  # the host waits for nothing
