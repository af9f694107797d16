"""Exchanges that are under way during the next inner step (overlap_steps = 1)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from harness.islands import UNITS, Member, loss_of, run_islands, samples
from harness.small_engine import random_pauses
from torch import Tensor, nn

from megatron_zpp.comm.code import EXACT
from megatron_zpp.comm.ledger import Category
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.unit import OuterUnit
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES

pytestmark = pytest.mark.virtual

BF16 = EngineOptions(POLICIES[3], dtype=torch.bfloat16)
IN_3_BITS = OuterOptions(4, overlap_steps=1)
EXACTLY = replace(IN_3_BITS, gradient_code=EXACT, difference_code=EXACT)
STEPS = 9


def trained(member: Member, steps: int = STEPS) -> tuple[list[float], Tensor]:
    losses = []
    for step in range(steps):
        losses.append(member.train(step))
        member.outer.step()
    return losses, member.weights()


def late_units(member: Member) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in member.outer.late_parameters))


def inner_weights(unit: OuterUnit) -> Tensor:
    return torch.cat([x.clone() for _, x in unit._pairs(unit.kept.values)])


def test_an_island_keeps_the_step_that_it_makes_meanwhile_and_adds_what_the_exchange_has_changed() -> None:
    """The outer step is that of SGD with Nesterov momentum on the mean of what islands had moved when it began."""

    def program(member: Member) -> list[list[Tensor]]:
        unit = member.outer.units[1]
        assert unit is not None
        seen = []
        for step in range(STEPS):
            member.train(step)
            trained_to = inner_weights(unit)
            member.outer.step()
            seen.append([trained_to, inner_weights(unit), torch.tensor("1.1.weight" in member.outer.late_parameters)])
        return seen

    options = replace(EXACTLY, learning_rate=0.7)
    first, second = run_islands(2, 1, program, options=options)
    outer = nn.Parameter(run_islands(2, 1, lambda member: inner_weights(member.outer.units[1]), options=options)[0])  # type: ignore[arg-type]
    sgd = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    ended = 0
    for step in range(1, STEPS):
        if not first[step - 1][2]:
            assert torch.equal(first[step][0], first[step][1])  # no exchange has ended
            continue
        began = [island[step - 1] for island in (first, second)]
        assert all(torch.equal(trained_to, after) for trained_to, after, _ in began)  # nor when it began
        outer.grad = torch.stack([outer.detach() - trained_to for trained_to, _, _ in began]).mean(dim=0)
        sgd.step()
        for island, (trained_to, _, _) in zip((first, second), began, strict=True):
            moved = island[step][0] - trained_to
            assert moved.abs().max() > 1e-3
            torch.testing.assert_close(island[step][1], outer.detach() + moved, rtol=0, atol=2e-6)
        ended += 1
    assert ended == 2


def test_all_ranks_have_the_same_late_units_and_at_most_two() -> None:
    """The last unit is all on the first rank of an island."""

    def program(member: Member) -> list[list[str]]:
        late = []
        for step in range(8):
            member.train(step)
            member.outer.step()
            late.append(late_units(member))
        return late

    for options, most in ((IN_3_BITS, 2), (replace(IN_3_BITS, is_staggered=False), 2)):
        found = run_islands(2, 2, program, options=options)
        assert all(of_rank == found[0] for of_rank in found) and max(map(len, found[0])) == most
    assert found[0][3] == found[0][7] == UNITS[-2:] and found[0][4] == []


def test_others_that_are_due_with_the_late_ones_are_waited_for() -> None:
    options = replace(IN_3_BITS, is_staggered=False)

    def program(member: Member) -> list[bool]:
        trained(member, 4)
        is_copy = []
        for unit in member.outer.units:
            assert unit is not None
            unit.wait()
            is_copy.append(all(torch.equal(x, copy) for copy, x in unit._pairs(unit.kept.values)))
        return is_copy

    assert run_islands(2, 1, program, options=options) == [[True, True, False, False]] * 2


def test_means_are_not_late() -> None:
    def program(member: Member) -> tuple[list[str], Tensor]:
        trained(member, 3)
        return late_units(member), member.weights()

    late = run_islands(2, 2, program, options=replace(IN_3_BITS, start_iteration=3))
    in_time = run_islands(2, 2, program, options=replace(IN_3_BITS, start_iteration=3, overlap_steps=0))
    for (names, weights), (_, expected) in zip(late, in_time, strict=True):
        assert names == [] and torch.equal(weights, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_when_messages_come_or_on_the_stage(dtype: torch.dtype) -> None:
    def weights(stage: int, seed: int | None) -> list[Tensor]:
        pause = None if seed is None else random_pauses(seed)
        options = EngineOptions(POLICIES[stage], dtype=dtype)
        return [found[1] for found in run_islands(2, 2, trained, options, IN_3_BITS, pause=pause)]

    expected = weights(3, None)
    assert not torch.equal(expected[0], expected[2])
    for stage, seed in ((3, 1), (3, 2), (1, None), (2, 3)):
        assert all(map(torch.equal, weights(stage, seed), expected))


def test_an_evaluation_reads_the_same_weights_everywhere_and_changes_no_bit() -> None:
    def program(member: Member, *, evaluates: bool) -> tuple[list[float], Tensor, list[float]]:
        losses, seen = [], []
        for step in range(STEPS):
            losses.append(member.train(step))
            member.outer.step()
            if evaluates:
                with member.outer.outer_weights(), torch.no_grad():
                    seen.append(loss_of(member.engine.module, samples(99, 0).bfloat16()).item())
        return losses, member.weights(), seen

    with_evaluations, without = (run_islands(2, 2, partial(program, evaluates=evaluates), BF16, IN_3_BITS) for evaluates in (True, False))
    for (losses, weights, seen), (expected_losses, expected, _) in zip(with_evaluations, without, strict=True):
        assert losses == expected_losses and torch.equal(weights, expected)
        assert seen == with_evaluations[0][2] and len(set(seen)) > 4


@pytest.mark.parametrize("is_staggered", [True, False])
def test_at_the_end_nothing_is_late_and_all_islands_have_the_same_weights(is_staggered: bool) -> None:
    def program(member: Member) -> tuple[Tensor, list[str]]:
        trained(member, 8)
        assert late_units(member)
        member.outer.take_means()
        return member.weights(), late_units(member)

    found = run_islands(2, 2, program, BF16, replace(IN_3_BITS, is_staggered=is_staggered))
    assert all(torch.equal(weights, found[0][0]) and late == [] for weights, late in found)


def test_closing_waits_for_what_is_late_and_every_exchange_is_counted_once() -> None:
    def program(member: Member) -> int:
        trained(member, 8)
        member.outer.close()
        member.engine.finish_updates()
        assert late_units(member) == []
        return member.engine.links.ledger.total(Category.OUTER).inter_bytes

    late, in_time = (run_islands(2, 2, program, BF16, replace(IN_3_BITS, overlap_steps=overlap)) for overlap in (1, 0))
    assert late == in_time


def test_closing_within_a_step_or_after_the_engine_ends_what_is_late() -> None:
    def program(member: Member, *, closes_engine: bool) -> tuple[bool, list[str]]:
        trained(member, 8)
        if closes_engine:
            member.engine.close()
        else:
            member.engine.backward(loss_of(member.engine.module, samples(8, member.outer.data_rank).bfloat16()))
        member.outer.close()
        return member.engine.is_joined, late_units(member)

    for closes_engine in (True, False):
        assert run_islands(2, 2, partial(program, closes_engine=closes_engine), BF16, IN_3_BITS) == [(False, [])] * 4


def test_after_an_error_of_an_update_outer_steps_are_closed_all_the_same() -> None:
    def program(member: Member) -> bool:
        trained(member, 8)

        def fails() -> None:
            raise ArithmeticError

        member.engine.write_before_use(member.engine.trained[0], fails)
        with pytest.raises(ArithmeticError):
            member.outer.close()
        return member.engine.is_joined

    assert run_islands(2, 1, program, BF16, IN_3_BITS) == [False, False]
