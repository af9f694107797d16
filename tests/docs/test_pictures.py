"""docs/pictures: every picture is what `python -m docs.draw` makes, and says what the code does."""

from __future__ import annotations

import re
from functools import cache
from html import unescape
from xml.etree import ElementTree

import pytest
from harness.places import ROOT

from docs.draw import FOLDER, PICTURES, drawn
from docs.drawing import house, lanes, memory, payload, quickstart, rungs, speedup, trace, unit_life
from docs.drawing.canvas import THEMES
from megatron_zpp.zero.policy import POLICIES, ZEROPP, Rung

pytestmark = pytest.mark.pure

NAMES = [f"{name}-{theme.name}.svg" for name in PICTURES for theme in THEMES]
drawn_once = cache(drawn)


def test_every_picture_is_stored_in_a_light_and_a_dark_look() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.svg")) == sorted(drawn_once())
    assert sorted(drawn_once()) == sorted(NAMES)
    assert {name.rsplit("-", 1)[1] for name in drawn_once()} == {"light.svg", "dark.svg"}


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_picture_is_what_the_script_draws(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == drawn_once()[name], "run python -m docs.draw"


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_well_formed_and_has_a_title(name: str) -> None:
    root = ElementTree.fromstring(drawn_once()[name])
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None and title.text


def test_words_of_a_picture_do_not_reach_beyond_its_edge() -> None:
    """In a wide font a character takes 0.54 of the font's size, in the mean over a line."""
    for name, text in drawn_once().items():
        width = float(re.search(r'viewBox="0 0 ([\d.]+) ', text)[1])
        for x, size, anchor, words in re.findall(
            r'<text x="([\d.]+)"[^>]*font-size="([\d.]+)"[^>]*text-anchor="(\w+)"[^>]*>([^<]*)<', text
        ):
            length = 0.54 * float(size) * len(unescape(words))
            end = float(x) + {"start": length, "middle": length / 2, "end": 0}[anchor]
            assert end <= width, (name, words)


def test_the_picture_of_rungs_shows_that_a_rung_is_filled_by_the_link_below_it() -> None:
    for rank in range(4):
        column = [other for other in range(4) if other % 2 == rank % 2]
        row = [other for other in range(4) if other // 2 == rank // 2]
        assert rungs.held("secondary", rank) == tuple(sorted(slice_ for other in column for slice_ in rungs.held("primary", other)))
        assert rungs.held("full", rank) == tuple(sorted(slice_ for other in row for slice_ in rungs.held("secondary", other)))


def test_a_payload_of_lean_takes_less_than_a_quarter_of_16_bits() -> None:
    parts = {name: payload.Parts.of(code) for name, (_, code) in payload.CODES.items()}
    assert parts["16 bits"].total == 1040 and parts["8 bits"].total == 544 and parts["4 bits"].total == 288
    assert parts["3 bits"].total < 1040 / 4


def test_a_unit_is_full_only_around_its_own_uses_and_its_secondary_rung_stays_where_the_policy_keeps_it() -> None:
    own = [column for column, word in enumerate(unit_life.columns()) if word == unit_life.UNIT]
    for policy in unit_life.ROWS.values():
        moments = unit_life.life(policy)
        assert [column for column, states in enumerate(moments) if states[Rung.FULL].is_there] == own
    between = range(own[0], own[1])
    assert not any(unit_life.life(POLICIES[3])[column][Rung.SECONDARY].is_there for column in between)
    assert all(unit_life.life(ZEROPP)[column][Rung.SECONDARY].is_there for column in between)
    assert unit_life.life(unit_life.LEAN)[-1][Rung.SECONDARY].is_stale


def test_every_room_of_the_house_is_drawn() -> None:
    rooms = {path.name for path in (ROOT / "megatron_zpp").iterdir() if (path / "__init__.py").exists()}
    assert {room for floor in house.floors() for room in floor} == rooms | {"entry"}


def test_the_parts_of_a_bar_of_memory_are_the_planned_need() -> None:
    for need in memory.plans().values():
        assert sum(memory._parts(need).values()) == need.total and min(memory._parts(need).values()) >= 0


def test_the_speedups_are_those_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{speedup.gains()['65mbit']['lean']:.1f}x" in readme


def test_the_quickstart_ends_below_token_frequencies_and_lean_sends_least() -> None:
    found = quickstart.recorded()
    assert list(found["compared"]) == ["ZeRO-3", "ZeRO++", "lean"]
    sent = [run["inter_node_bytes"] for run in found["compared"].values()]
    assert sent == sorted(sent, reverse=True) and sent[2] < sent[0] / 7
    last_validation = quickstart.curve(found["run"]["validation_losses"])[-1][1]
    assert found["gain_nats"] == found["token_frequencies_loss"] - last_validation > 1


def test_a_hop_is_encoded_before_it_is_sent_and_decoded_after_it_has_crossed() -> None:
    steps = lanes.recorded()["steps"]
    assert set(steps) == {"ZeRO-3", "ZeRO++", "lean"}
    for step in steps.values():
        assert set(step["lanes"]) == set(lanes.LANES)
        assert all(times == sorted(times) for hops in step["lanes"].values() for _, *times in hops)


def test_the_picture_of_a_trace_has_every_unit_in_forward_and_backward_and_hops_on_every_lane() -> None:
    step = trace.recorded()
    units = ["(root)", "patches", "layers.0", "layers.1"]
    assert [unit for phase, unit, *_ in step["computed"] if phase == "forward"] == units
    assert [unit for phase, unit, *_ in step["computed"] if phase == "backward"] == ["(root)", *reversed(units[1:])]
    for lane in lanes.LANES:
        assert {unit for unit, *_ in step["lanes"][lane]} <= set(units) and step["lanes"][lane]
    for unit in units:
        assert unit in {of_hop for of_hop, *_ in step["lanes"]["inter-descend"]}
