"""The automaton of rungs against an executor that knows nothing but versions: what each rung holds, and what is on its way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.comm.code import Code
from megatron_zpp.parallel.topology import Topology
from megatron_zpp.zero.policy import POLICIES, Policy, Rung, with_weight_differences
from megatron_zpp.zero.residency import Residency

PRIMARY, SECONDARY, FULL = Rung.PRIMARY, Rung.SECONDARY, Rung.FULL
KEEPS_SECONDARY = replace(POLICIES[3], weights_in_step=SECONDARY)
DIFFERENCES = with_weight_differences(KEEPS_SECONDARY, Code.gaussian(3, rounds=1))
ROWS = {**{f"stage {stage}": policy for stage, policy in POLICIES.items()}, "hpZ": KEEPS_SECONDARY, "differences": DIFFERENCES}
FOUR_RANKS, ONE_RANK = Topology.of_nodes(2, 2), Topology.of_nodes(1, 1)
policies = st.sampled_from(list(ROWS.values()))
worlds = st.sampled_from([FOUR_RANKS, ONE_RANK])
operations = st.lists(st.sampled_from(["climb secondary", "climb full", "wait", "rest", "rest", "write"]), max_size=40)


@dataclass
class Executor:
    """One unit whose contents are numbers: the version of the main weights that a rung was made from.

    A hop reads its source when it is waited for, as late as anything can, so that a source that goes too early is seen.
    """

    policy: Policy
    world: Topology = FOUR_RANKS
    version: int = 1
    holds: dict[Rung, int] = field(default_factory=dict)
    hops: list[tuple[Rung, int]] = field(default_factory=list)  # every hop that was ever submitted, with the version at that time

    def __post_init__(self) -> None:
        self.residency: Residency[int] = Residency(self.policy, self.world)

    def climb(self, rung: Rung) -> None:
        for missing in self.residency.needs(rung):
            if self.policy.optimizer is FULL or self.world is ONE_RANK:
                self.holds[missing] = self.version
                self.residency.filled(missing)
                continue
            assert missing not in self.residency.under_way() and not self.residency.is_fresh(missing), "a rung climbs twice"
            if missing is FULL:
                below = self.residency.ticket_below(FULL)
                assert (below is None) == (self.holds.get(SECONDARY) == self.version), "a climb from a rung that is not there"
            self.hops.append((missing, self.version))
            self.residency.submitted(missing, len(self.hops))

    def wait(self) -> None:
        if self.residency.is_fresh(FULL):
            return
        for rung, ticket in self.residency.under_way().items():
            source = self.version if rung is SECONDARY else self.holds[SECONDARY]
            assert self.hops[ticket - 1] == (rung, self.version), "a hop of other weights is taken for one of these"
            self.holds[rung] = source
        self.let_go(self.residency.landed())

    def write(self) -> None:
        self.let_go(self.residency.invalidate())
        self.version += 1

    def rest(self) -> None:
        self.let_go(self.residency.rest())

    def let_go(self, rungs: tuple[Rung, ...]) -> None:
        for rung in rungs:
            assert rung not in self.residency.under_way(), "storage goes while a hop writes to it"
            self.holds.pop(rung, None)

    def do(self, operation: str) -> None:
        match operation:
            case "climb secondary":
                self.climb(SECONDARY)
            case "climb full":
                self.climb(FULL)
            case "wait" if FULL in self.residency.under_way() or self.residency.is_fresh(FULL):
                self.wait()
                assert self.holds[FULL] == self.version, "a use reads old weights"
            case "rest":
                self.rest()
            case "write":
                self.write()


@given(policies, worlds, operations)
def test_whoever_waits_reads_the_weights_of_now_and_no_hop_is_submitted_twice_or_from_nothing(
    policy: Policy, world: Topology, steps: list[str]
) -> None:
    unit = Executor(policy, world)
    for step in steps:
        unit.do(step)
        for rung in (SECONDARY, FULL):
            assert not unit.residency.is_fresh(rung) or unit.holds.get(rung) == unit.version, f"{rung.name} is called fresh and is not"
    unit.climb(FULL)
    unit.wait()
    assert unit.holds[FULL] == unit.version


@given(policies, worlds, operations)
def test_a_rest_lets_go_of_all_that_stands_above_where_weights_rest_and_of_nothing_else(
    policy: Policy, world: Topology, steps: list[str]
) -> None:
    unit = Executor(policy, world)
    for step in steps:
        unit.do(step)
    before, under_way = dict(unit.holds), unit.residency.under_way()
    unit.rest()
    kept = {rung for rung in before if rung <= policy.weights_in_step}
    assert set(unit.holds) == (set(before) if under_way else kept)


@given(st.lists(st.sampled_from(["climb full", "climb secondary", "wait", "rest"]), max_size=40))
def test_weights_that_stay_cross_each_link_once_until_they_are_written(steps: list[str]) -> None:
    for name, once in {"stage 0": [], "stage 1": [SECONDARY, FULL], "stage 2": [SECONDARY, FULL], "hpZ": [SECONDARY]}.items():
        unit = Executor(ROWS[name])
        for step in [*steps, "climb full", "wait", "rest", "climb full", "wait"]:
            unit.do(step)
        submitted = [rung for rung, _ in unit.hops]
        assert [rung for rung in submitted if rung in once] == once
        assert name != "stage 0" or not submitted


def test_a_step_of_stage_3_climbs_for_forward_and_again_for_backward() -> None:
    unit = Executor(POLICIES[3])
    for step in ["climb full", "wait", "rest", "climb secondary", "climb full", "wait", "rest", "write", "climb full"]:
        unit.do(step)
    assert unit.hops == [(SECONDARY, 1), (FULL, 1)] * 2 + [(SECONDARY, 2), (FULL, 2)]


def test_what_is_under_way_neither_rests_nor_climbs_again() -> None:
    residency: Residency[str] = Residency(POLICIES[3], FOUR_RANKS)
    residency.submitted(SECONDARY, "first")
    assert residency.rest() == () and residency.needs(SECONDARY) == () and residency.needs(FULL) == (FULL,)
    assert residency.ticket_below(FULL) == "first"
    residency.submitted(FULL, "second")
    assert (
        residency.rest() == ()
        and residency.needs(FULL) == ()
        and list(residency.under_way().items()) == [(SECONDARY, "first"), (FULL, "second")]
    )
    assert residency.landed() == (SECONDARY,)
    assert residency.rest() == (SECONDARY, FULL)


def test_landing_without_a_climb_to_the_full_rung_is_an_error() -> None:
    residency: Residency[str] = Residency(POLICIES[3], FOUR_RANKS)
    residency.submitted(SECONDARY, "hop")
    with pytest.raises(RuntimeError, match="no climb to the full rung"):
        residency.landed()


@pytest.mark.parametrize("row", list(ROWS))
def test_a_payload_that_is_kept_with_the_primary_rung_is_stale_after_a_write(row: str) -> None:
    residency: Residency[str] = Residency(ROWS[row], FOUR_RANKS)
    assert not residency.is_fresh(PRIMARY)
    residency.filled(PRIMARY)
    assert residency.is_fresh(PRIMARY)
    residency.rest()
    assert residency.is_fresh(PRIMARY)
    residency.invalidate()
    assert not residency.is_fresh(PRIMARY)


@pytest.mark.parametrize("row", list(ROWS))
def test_a_write_keeps_storage_of_the_full_rung_only_where_weights_rest_there(row: str) -> None:
    kept = {"stage 0": True, "stage 1": True, "stage 2": True, "stage 3": False, "hpZ": False, "differences": False}[row]
    assert (FULL not in Residency(ROWS[row], FOUR_RANKS).invalidate()) == kept


def test_where_the_optimizer_rests_full_the_full_rung_alone_is_filled_and_without_a_hop() -> None:
    residency: Residency[str] = Residency(POLICIES[0], FOUR_RANKS)
    assert residency.fills_without_hops and residency.needs(SECONDARY) == () and residency.needs(FULL) == (FULL,)
    residency.filled(FULL)
    assert residency.needs(FULL) == () and not any(Residency(ROWS[row], FOUR_RANKS).fills_without_hops for row in ROWS if row != "stage 0")


@pytest.mark.parametrize("row", list(ROWS))
def test_on_the_one_rank_of_a_world_the_full_rung_alone_is_filled_and_without_a_hop(row: str) -> None:
    unit = Executor(ROWS[row], ONE_RANK)
    for step in ["climb secondary", "climb full", "wait", "rest", "climb full", "wait", "write", "climb full", "wait"]:
        unit.do(step)
    assert unit.hops == [] and set(unit.holds) == {FULL}


@given(operations)
def test_the_storage_of_a_copy_that_is_kept_across_steps_stays(steps: list[str]) -> None:
    unit = Executor(ROWS["differences"], FOUR_RANKS)
    unit.do("climb full")
    unit.do("wait")
    for step in steps:
        unit.do(step)
        assert SECONDARY in unit.holds
