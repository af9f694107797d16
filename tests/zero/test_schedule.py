from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from harness.scheduled_units import INTER_CLIMB, INTRA_CLIMB, ScheduledUnits, backward_moments, forward_moments
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.parallel.specs import Use
from megatron_zpp.zero import schedule as schedule_module
from megatron_zpp.zero.schedule import Moment, Phase, Prefetch, descent_order, evaluation_schedule, training_schedule

prefetches = st.builds(Prefetch, st.integers(0, 4), st.integers(0, 4))


def _uses(blocks: int, is_tied: bool, chunk: int | None = None, outer: tuple[str, ...] = (), frozen: int = 0) -> tuple[Use, ...]:
    """chunk: blocks that are recomputed together; None: without recomputation. outer: units of the whole module. frozen: uses at first."""
    middle = tuple(Use(f"blocks.{index}", (f"b{index}",), True, chunk and index // chunk) for index in range(blocks))
    inner = (Use("embedding", ("emb",), False), *middle, Use("final", ("norm", "emb" if is_tied else "head"), True))
    known = tuple(replace(use, backward_is_sure=index >= frozen) for index, use in enumerate(inner))
    return (Use("", outer, True), *known) if outer else known


models = st.builds(_uses, st.integers(1, 8), st.booleans(), st.none() | st.integers(1, 5))
own_modules = st.builds(  # shard() gives these
    _uses, st.integers(1, 8), st.booleans(), st.none(), st.sampled_from([(), ("root",), ("root", "emb"), ("b0",)]), st.integers(0, 4)
)


def _microbatch(uses: tuple[Use, ...], prefetch: Prefetch) -> ScheduledUnits:
    units = ScheduledUnits(uses)
    units.run(training_schedule(uses, prefetch), forward_moments(uses) + backward_moments(uses))
    return units


@given(models | own_modules, prefetches)
def test_every_unit_that_a_use_reads_was_submitted_before_it_is_waited_for_and_stands_full_when_it_is_read(
    uses: tuple[Use, ...], prefetch: Prefetch
) -> None:
    _microbatch(uses, prefetch)


@given(models | own_modules, prefetches)
def test_after_a_micro_batch_everything_rests_and_nothing_is_on_its_way(uses: tuple[Use, ...], prefetch: Prefetch) -> None:
    assert _microbatch(uses, prefetch).at_rest


@given(models, prefetches)
def test_blocks_and_a_tied_embedding_climb_twice_per_micro_batch_and_the_others_once(uses: tuple[Use, ...], prefetch: Prefetch) -> None:
    is_tied = "emb" in uses[-1].units
    expected = Counter({use.units[0]: 2 for use in uses[1:-1]}) + Counter(norm=1, emb=2 if is_tied else 1)
    if not is_tied:
        expected["head"] = 1
    units = _microbatch(uses, prefetch)
    assert Counter(units.climbs(INTRA_CLIMB)) == expected
    assert Counter(units.climbs(INTER_CLIMB)) == expected


@given(own_modules, prefetches)
def test_what_the_whole_module_reads_climbs_once_and_what_backward_does_not_reach_is_not_gathered_for_it(
    uses: tuple[Use, ...], prefetch: Prefetch
) -> None:
    outer = uses[0].units if uses[0].module == "" else ()
    others = uses[1:] if outer else uses
    last = others[-1].units
    in_backward = {unit for use in others if use.backward_is_sure and use.needs_weights_in_backward for unit in use.units} - {*last}
    found = Counter(_microbatch(uses, prefetch).climbs(INTRA_CLIMB))
    assert all(found[unit] == 1 for unit in outer)
    for unit in {unit for use in others for unit in use.units} - {*outer, "emb"}:
        assert found[unit] == 1 + (unit in in_backward)


@given(models | own_modules, prefetches)
def test_climbs_are_submitted_in_the_order_of_need_whatever_the_prefetch(uses: tuple[Use, ...], prefetch: Prefetch) -> None:
    by_need, ahead = _microbatch(uses, Prefetch(0, 0)), _microbatch(uses, prefetch)
    for lane in (INTRA_CLIMB, INTER_CLIMB):
        assert ahead.climbs(lane) == by_need.climbs(lane)


@given(st.integers(4, 12), st.booleans(), st.integers(1, 4), prefetches)
def test_how_many_units_stand_full_at_once_depends_on_the_chunk_and_not_on_the_depth(
    blocks: int, is_tied: bool, chunk: int, prefetch: Prefetch
) -> None:
    assert _microbatch(_uses(blocks, is_tied, chunk), prefetch).most_full <= 3 + chunk + prefetch.intra_uses


@given(models | own_modules, prefetches)
def test_an_evaluation_reads_full_units_climbs_once_per_use_and_ends_at_rest(uses: tuple[Use, ...], prefetch: Prefetch) -> None:
    units = ScheduledUnits(uses)
    units.run(evaluation_schedule(uses, prefetch), forward_moments(uses, is_training=False))
    outer = uses[0].units if uses[0].module == "" else ()
    inner = Counter(unit for use in uses for unit in use.units if unit not in outer)
    assert Counter(units.climbs(INTRA_CLIMB)) == Counter(outer) + inner
    assert units.at_rest


@given(models | own_modules, prefetches, st.data())
def test_an_evaluation_between_any_two_moments_leaves_the_micro_batch_with_full_units(
    uses: tuple[Use, ...], prefetch: Prefetch, data: st.DataObject
) -> None:
    forward = forward_moments(uses)
    moments = forward + backward_moments(uses)
    at = data.draw(st.sampled_from([0, len(forward), len(moments)]))  # before forward, before backward, after both
    units, training = ScheduledUnits(uses), training_schedule(uses, prefetch)
    units.run(training, moments[:at])
    units.run(evaluation_schedule(uses, prefetch), forward_moments(uses, is_training=False))
    units.run(training, moments[at:])


@given(models)
def test_without_prefetch_a_moment_lists_the_units_of_its_own_use_only(uses: tuple[Use, ...]) -> None:
    for moment, actions in training_schedule(uses, Prefetch(0, 0)).items():
        assert set(actions.climb_to_full) <= set(uses[moment.use].units)
        assert actions.climb_to_full == actions.climb_to_secondary == actions.wait


@given(models)
def test_units_descend_once_each_in_the_order_in_which_backward_completes_them(uses: tuple[Use, ...]) -> None:
    completed: list[str] = []
    for index in reversed(range(len(uses))):  # a unit is complete after the backward of the first use that reads it
        earlier = {unit for use in uses[:index] for unit in use.units}
        completed += [unit for unit in uses[index].units if unit not in earlier]
    assert list(descent_order(uses)) == completed


def test_a_model_of_one_use_keeps_its_weights_from_forward_to_backward() -> None:
    uses = (Use("all", ("all",), True),)
    units = _microbatch(uses, Prefetch())
    assert units.climbs(INTRA_CLIMB) == ["all"]
    assert units.at_rest


def test_a_unit_read_by_two_neighbouring_uses_does_not_rest_between_them() -> None:
    uses = (Use("a", ("x",), True), Use("b", ("x", "y"), True), Use("c", ("z",), True))
    assert _microbatch(uses, Prefetch(0, 0)).climbs(INTRA_CLIMB) == ["x", "y", "z", "x", "y"]


COLUMNS = ("rest", "climb_to_secondary", "climb_to_full", "wait")


@pytest.mark.parametrize("column", COLUMNS)
def test_the_table_at_the_top_of_the_file_is_true(column: str) -> None:
    uses = (Use("e", ("emb",), False), Use("0", ("b0",), True), Use("1", ("b1",), True), Use("f", ("head", "emb"), True))
    actions = training_schedule(uses, Prefetch(inter_uses=2, intra_uses=1))
    drawn = _drawn_table(schedule_module.__doc__)
    assert set(drawn) == set(actions) - {Moment(Phase.AFTER_BACKWARD, 0)}
    for moment, cells in drawn.items():
        assert " ".join(getattr(actions[moment], column)) == cells[COLUMNS.index(column)], moment


@pytest.mark.parametrize("column", COLUMNS)
def test_the_table_of_a_recomputed_chunk_is_true(column: str) -> None:
    uses = (Use("e", ("emb",), False), Use("0", ("b0",), True, 0), Use("1", ("b1",), True, 0), Use("f", ("head", "emb"), True))
    actions = training_schedule(uses, Prefetch(inter_uses=2, intra_uses=1))
    drawn = _drawn_table(training_schedule.__doc__)
    moments = list(actions)
    assert list(drawn) == moments[moments.index(Moment(Phase.PRE_BACKWARD, 2)) : -1]
    for moment, cells in drawn.items():
        assert " ".join(getattr(actions[moment], column)) == cells[COLUMNS.index(column)], moment


def _drawn_table(text: str | None) -> dict[Moment, list[str]]:
    table = {}
    for line in (text or "").splitlines():
        found = re.match(r"\s+(pre_forward|post_forward|pre_backward|recompute)\s+(\d)\s+(.*)", line)
        if found:
            cells = ["" if cell == "-" or cell.startswith("(") else cell for cell in re.split(r"\s{2,}", found[3].strip())]
            table[Moment(Phase(found[1]), int(found[2]))] = cells + [""] * (len(COLUMNS) - len(cells))
    return table
