"""Where shared elements are on each tensor rank, for the real model's parts, against plain slicing of its parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from harness.tensor_parts import MODELS, VOCAB, config_of, part_of

from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.parallel.division import Division, Gradient, HeldRange
from megatron_zpp.parallel.specs import ParamSpec
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.shared_gradients import (
    SharedPlace,
    Sharing,
    most_shared_numel,
    shared_places,
    sharing_received_bytes,
)

BLOCK = 8
CASES = [(model, ranks, data_ranks) for turn, model in enumerate(MODELS) for ranks, data_ranks in ((2, 1 + turn % 3), (4, 4), (8, 3))]
Element = tuple[str, int]  # of a whole parameter: its number


@cache
def layouts_of(model: str, ranks: int, rank: int, data_ranks: int) -> list[FlatLayout]:
    units = ModelShape(config_of(model), VOCAB, ranks, rank, sequence_parallel=ranks == 4).unit_specs()
    return [FlatLayout(unit.params, data_ranks, BLOCK) for unit in units]


def elements_at(model: str, ranks: int, rank: int, data_ranks: int, first: int, slices: int) -> dict[tuple[int, int], Element]:
    """By unit and offset in the flat buffer of some slices: the element that the rank has there."""
    found = {}
    for unit, layout in enumerate(layouts_of(model, ranks, rank, data_ranks)):
        for segment in layout.segments(first, slices):
            shape = segment.spec.whole_shape
            numbers = part_of(segment.spec.name, torch.arange(math.prod(shape)).view(shape), config_of(model), ranks, rank).flatten()
            for place in range(segment.start, segment.stop):
                found[unit, segment.offset + place - segment.start] = (segment.spec.name, int(numbers[place]))
    return found


def offsets(places: list[SharedPlace]) -> Iterator[tuple[int, int]]:
    for place in places:
        yield from ((place.unit, offset) for offset in range(place.start, place.stop))


@pytest.mark.parametrize("model, ranks, data_ranks", CASES)
def test_tensor_ranks_have_the_elements_that_they_share_at_the_same_places_and_no_others(model: str, ranks: int, data_ranks: int) -> None:
    for first, slices in (*((index, 1) for index in range(data_ranks)), (0, data_ranks)):
        places = [shared_places(layouts_of(model, ranks, rank, data_ranks), first, slices, ranks) for rank in range(ranks)]
        assert all(list(found.items()) == list(places[0].items()) for found in places)
        elements = [elements_at(model, ranks, rank, data_ranks, first, slices) for rank in range(ranks)]
        holders = Counter(element for own in elements for element in set(own.values()))
        shared = Counter[Element]()
        for sharing, of_all in places[0].items():
            for at in offsets(of_all):
                for rank in range(ranks):
                    assert [holder for holder in range(ranks) if elements[holder][at] == elements[rank][at]] == list(sharing.holders[rank])
                    shared[elements[rank][at]] += 1
        assert shared == Counter({element: count for element, count in holders.items() if count > 1})


@pytest.mark.parametrize("model, ranks, data_ranks", CASES)
def test_the_numbers_of_shared_elements_are_those_of_the_places(model: str, ranks: int, data_ranks: int) -> None:
    layouts = layouts_of(model, ranks, 0, data_ranks)

    def listed(first: int, slices: int) -> int:
        return sum(place.numel for of_all in shared_places(layouts, first, slices, ranks).values() for place in of_all)

    of_slices = [listed(index, 1) for index in range(data_ranks)]
    assert listed(0, data_ranks) == sum(of_slices) == most_shared_numel(layouts, data_ranks)
    assert max(of_slices) <= most_shared_numel(layouts, 1) <= sum(of_slices)


def test_one_tensor_rank_shares_nothing_and_pays_nothing() -> None:
    layouts = layouts_of("Llama 3", 1, 0, 2)
    assert shared_places(layouts, 0, 2, 1) == {}
    assert most_shared_numel(layouts, 2) == 0
    assert sharing_received_bytes(7, 1) == 0


@pytest.mark.parametrize("ranks", [1, 4])
def test_parts_for_another_number_of_tensor_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(RuntimeError, match=rf"parameter embedding\.word\.weight: .* over tensor ranks \[0, 1\], and there are {ranks}"):
        shared_places(layouts_of("Llama 3", 2, 1, 2), 0, 1, ranks)


def test_a_rank_receives_what_the_others_have_and_keeps_its_own_beside_what_all_have() -> None:
    assert sharing_received_bytes(7, 4) == 3 * 7 * 4


def spec_of(runs: tuple[HeldRange, ...], rank: int) -> ParamSpec:
    return ParamSpec("blocks.3.norm.weight", Division((runs[-1].stop,), 0, runs, rank, Gradient.PARTIAL), lambda start, stop: 0, False)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    "runs, words",
    [
        ((HeldRange(0, 4, (0, 1)), HeldRange(4, 6, (0,))), None),
        ((HeldRange(0, 2, (0,)), HeldRange(2, 6, (0, 1))), "the tensor ranks have shared elements at different places of their parts"),
        ((HeldRange(0, 2, (0,)), HeldRange(2, 4, (1, 2))), "different places"),
        ((HeldRange(0, 4, (0, 1)), HeldRange(4, 6, (0, 2)), HeldRange(6, 8, (1, 2)), HeldRange(8, 10, (2,))), "different places"),
        (
            (HeldRange(0, 2, (0, 1)), HeldRange(2, 4, (0, 2)), HeldRange(4, 6, (1, 2))),
            "elements 2 to 4 of the parts are not the same on tensor ranks (0, 2)",
        ),
    ],
)
def test_parts_whose_shared_elements_are_not_at_one_place_are_refused_on_every_rank(runs: tuple[HeldRange, ...], words: str | None) -> None:
    ranks = 1 + max(holder for run in runs for holder in run.holders)
    for rank in range(ranks):
        layout = FlatLayout([spec_of(runs, rank)], 1, 4)
        if words is None:
            assert shared_places([layout], 0, 1, ranks) == {Sharing(((0, 1), (0, 1)), Gradient.PARTIAL): [SharedPlace(0, 0, 4)]}
        else:
            with pytest.raises(RuntimeError, match=r"parameter blocks\.3\.norm\.weight: ") as error:
                shared_places([layout], 0, 1, ranks)
            assert words in str(error.value)
