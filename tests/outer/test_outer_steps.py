"""What outer steps do with the weights of islands."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import pytest
import torch
from harness.islands import RATE, UNITS, WIDTH, Member, loss_of, run_islands, samples, small_module, weights_of
from harness.small_engine import random_pauses
from torch import Tensor, nn

from megatron_zpp.comm.code import EXACT, Code, Rotation, Rounding, SliceShape
from megatron_zpp.comm.codec import Codec, Regions
from megatron_zpp.comm.codecs import CastCodec
from megatron_zpp.comm.ledger import Category, Traffic
from megatron_zpp.outer.all_islands import AllIslands
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.unit import OuterUnit
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES, ZEROPP, Policy, with_offloaded_optimizer, with_quantized_gradients
from megatron_zpp.zero.schedule import Prefetch

pytestmark = pytest.mark.virtual

FP32, BF16 = EngineOptions(POLICIES[3]), EngineOptions(POLICIES[3], dtype=torch.bfloat16)
EXACTLY = OuterOptions(4, gradient_code=EXACT, difference_code=EXACT)
PLAIN_AVERAGE = replace(EXACTLY, learning_rate=1.0, momentum=0.0)
IN_3_BITS = OuterOptions(4)


def trained(member: Member, steps: int, *, stream: int | None = None) -> tuple[list[float], Tensor]:
    """Losses, and the inner weights of the island."""
    losses = []
    for step in range(steps):
        losses.append(member.train(step, stream=stream))
        member.outer.step()
    return losses, member.weights()


def outer_weights(member: Member) -> Tensor:
    with member.outer.outer_weights():
        return member.weights()


def units_of(member: Member) -> list[OuterUnit]:
    return [unit for unit in member.outer.units if unit is not None]


# ---- the algorithm


def weights_around_one() -> nn.Sequential:
    """No step of a test takes any of its weights to less than half or more than twice what it was."""
    module = small_module()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(2)
        for parameter in module.parameters():
            parameter.copy_(torch.where(torch.rand_like(parameter) < 0.5, -1.0, 1.0) + 0.3 * (torch.rand_like(parameter) - 0.5))
    return module


@pytest.mark.parametrize("is_staggered", [True, False])
@pytest.mark.parametrize("islands", [2, 4])
def test_islands_that_have_equal_samples_and_take_plain_averages_have_the_bits_of_one_alone(islands: int, is_staggered: bool) -> None:
    """The outer gradient of a weight that has not halved or doubled is exact."""
    options, module = replace(PLAIN_AVERAGE, is_staggered=is_staggered), weights_around_one()

    def alone(member: Member) -> tuple[list[float], Tensor]:
        return [member.train(step, stream=member.engine.rank) for step in range(9)], member.weights()

    expected = run_islands(1, 2, alone, options=options, module=module)
    found = run_islands(islands, 2, lambda member: trained(member, 9, stream=member.engine.rank), options=options, module=module)
    for rank, (losses, weights) in enumerate(found):
        expected_losses, expected_weights = expected[rank % 2]
        assert losses == expected_losses
        assert torch.equal(weights, expected_weights)


def test_an_average_after_each_step_is_plain_training_where_the_inner_step_is_linear() -> None:
    """AdamW without momentum and with a large eps is gradient descent; its means over islands are those over all samples."""
    eps = 1e6
    adam = AdamOptions(beta1=0.0, beta2=0.0, eps=eps, weight_decay=0.0)

    def program(member: Member) -> Tensor:
        for step in range(6):
            member.engine.backward(loss_of(member.engine.module, samples(step, member.outer.data_rank)))
            member.engine.step(0.1 * eps)
            member.outer.step()
        return member.weights()

    module = small_module()
    found = run_islands(2, 2, program, replace(FP32, adam=adam, clip_grad=0.0), replace(PLAIN_AVERAGE, period=1), module=module)
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        torch.stack([loss_of(reference, samples(step, stream)) for stream in range(4)]).mean().backward()
        optimizer.step()
    expected = weights_of(reference)
    moved = (expected - weights_of(module)).norm()
    assert moved > 0.5
    for weights in found:
        assert (weights - expected).norm() < 1e-5 * moved


def test_the_outer_step_has_the_bits_of_sgd_with_nesterov_momentum_on_the_mean_of_what_islands_have_moved() -> None:
    options = replace(EXACTLY, period=2, is_staggered=False, learning_rate=0.7)

    def program(member: Member) -> tuple[list[Tensor], list[Tensor]]:
        before, after = [], []
        for step in range(6):
            member.train(step)
            before.append(member.weights())
            member.outer.step()
            after.append(member.weights())
        return before[1::2], after[1::2]

    first, _, second, _ = run_islands(2, 2, program, options=options)
    weight = nn.Parameter(weights_of(small_module()))
    sgd = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    for own, others, outer in zip(first[0], second[0], first[1], strict=True):
        assert not torch.equal(own, others)
        weight.grad = ((weight.detach() - own) + (weight.detach() - others)) / 2
        sgd.step()
        assert torch.equal(outer, weight.detach())


def test_until_outer_steps_begin_islands_take_plain_means_and_gather_no_momentum() -> None:
    options = replace(EXACTLY, start_iteration=3)

    def program(member: Member) -> tuple[list[Tensor], list[Tensor], bool]:
        before, after = [], []
        for step in range(3):
            member.train(step)
            before.append(member.weights())
            member.outer.step()
            after.append(member.weights())
        has_momentum = any(unit.momentum.any() for unit in units_of(member))
        for step in range(3, 5):
            member.train(step)
            member.outer.step()
        assert any(unit.momentum.any() for unit in units_of(member))
        return before, after, has_momentum

    first, second = run_islands(2, 1, program, options=options)
    for own, others, mean in zip(first[0], second[0], first[1], strict=True):
        assert not torch.equal(own, others)
        torch.testing.assert_close(mean, (own + others) / 2, rtol=0, atol=2**-23)
    assert not first[2]


def test_one_island_alone_takes_outer_steps_too() -> None:
    """They change its training, so they are not left out."""
    options = replace(EXACTLY, is_staggered=False, learning_rate=0.5, momentum=0.0)

    def program(member: Member) -> tuple[Tensor, Tensor]:
        for step in range(4):
            member.train(step)
        inner = member.weights()
        member.outer.step()
        return inner, member.weights()

    inner, outer = run_islands(1, 2, program, options=options)[0]
    torch.testing.assert_close(outer, (weights_of(small_module()) + inner) / 2, rtol=0, atol=1e-6)


def test_at_the_end_all_islands_can_take_the_mean_of_what_they_have_learned_and_momentum_stays() -> None:
    def program(member: Member) -> tuple[Tensor, Tensor, Tensor]:
        trained(member, 5)
        momentum = torch.cat([unit.momentum for unit in units_of(member)])
        inner = member.weights()
        member.outer.take_means()
        means = member.weights()
        assert torch.equal(torch.cat([unit.momentum for unit in units_of(member)]), momentum)
        member.outer.take_means()
        return inner, means, member.weights()

    first, _, second, _ = run_islands(2, 2, program, options=EXACTLY)
    assert torch.equal(first[1], second[1])
    torch.testing.assert_close(first[1], (first[0] + second[0]) / 2, rtol=0, atol=2**-23)
    torch.testing.assert_close(first[2], first[1], rtol=0, atol=2**-23)


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_means_that_follow_an_exchange_at_once_are_those_of_its_weights(overlap_steps: int) -> None:
    """The exchange is under way when the means are taken."""

    def program(member: Member, *, waits: bool) -> tuple[Tensor, Traffic]:
        for step in range(4):
            member.train(step)
            member.outer.step()
        if waits:
            member.outer.check_open()
        member.outer.take_means()
        return member.weights(), member.engine.links.ledger.total(Category.OUTER)

    options = replace(IN_3_BITS, is_staggered=False, overlap_steps=overlap_steps)
    expected = run_islands(2, 2, partial(program, waits=True), options=options)
    for pause in (None, random_pauses(1)):
        found = run_islands(2, 2, partial(program, waits=False), options=options, pause=pause)
        for (weights, traffic), (expected_weights, expected_traffic) in zip(found, expected, strict=True):
            assert torch.equal(weights, expected_weights) and traffic == expected_traffic


def test_a_second_call_after_one_step_does_nothing() -> None:
    def program(member: Member) -> bool:
        trained(member, 4)
        weights, momentum = member.weights(), torch.cat([unit.momentum for unit in units_of(member)])
        member.outer.step()
        return torch.equal(member.weights(), weights) and torch.equal(torch.cat([unit.momentum for unit in units_of(member)]), momentum)

    assert all(run_islands(2, 2, program, options=replace(EXACTLY, is_staggered=False)))


def test_an_exchange_is_under_way_until_its_unit_is_needed() -> None:
    """Units before it compute meanwhile."""
    events: list[str] = []

    def program(member: Member) -> None:
        member.train(0)
        for unit, name in zip(units_of(member), UNITS, strict=True):

            def finishes(unit: OuterUnit = unit, name: str = name) -> Traffic:
                events.append(f"exchanged {name}")
                return OuterUnit.finish(unit)

            unit.finish = finishes  # type: ignore[method-assign]
        for name in UNITS:
            member.engine.module.get_submodule(name).register_forward_hook(lambda *_, name=name: events.append(f"computed {name}"))
        member.train(1)
        events.clear()
        member.outer.step()  # the second half of the model is due
        events.append("step")
        member.train(2)

    not_ahead = replace(FP32, prefetch=Prefetch(0, 0))
    run_islands(1, 1, program, not_ahead, replace(EXACTLY, period=2, is_staggered=False))
    of_last = ["exchanged 2", "computed 2", "exchanged 3", "computed 3"]
    assert events == ["exchanged 0", "exchanged 1", "step", "computed 0", "computed 1", *of_last]


def test_what_is_under_way_at_the_end_is_waited_for() -> None:
    def program(member: Member) -> None:
        member.train(0)
        member.outer.step()
        assert member.engine._writes
        member.outer.close()
        assert not member.engine._writes

    run_islands(2, 1, program, options=replace(EXACTLY, period=1))


def test_the_norm_of_weights_is_that_after_the_exchange_which_is_under_way() -> None:
    def program(member: Member) -> tuple[float, float]:
        member.train(0)
        member.outer.step()
        return member.engine.weight_norm(), member.weights().double().norm().item()

    first, second = run_islands(2, 1, program, options=replace(EXACTLY, period=1))
    assert first == second
    assert first[0] == pytest.approx(first[1], rel=1e-12)


def test_ranks_of_all_islands_are_counted_island_after_island() -> None:
    assert run_islands(2, 3, lambda member: member.outer.everyone.rank) == list(range(6))


def test_numbers_of_all_islands_are_in_the_order_of_their_data_and_tensor_ranks() -> None:
    """Three islands of two data ranks of two tensor ranks; each number says island, data rank, tensor rank and place."""
    rows = torch.arange(24).view(3, 4, 2)

    def gather(others: torch.Tensor, *shape: int) -> SimpleNamespace:
        return SimpleNamespace(rank=0, gather_world=lambda own: others.reshape(*shape, own.numel()))

    column = gather(rows[:, 1], 3, 1)  # of the ranks that have place 1 on each island
    island = gather(rows.transpose(0, 1), 2, 2)  # what each rank of this island has from its column
    everyone = AllIslands(island, column, 4).gather_world(rows[0, 1])
    assert everyone.tolist() == rows.view(6, 2, 2).tolist()


def test_first_exchanges_are_exact_where_the_engine_trains_in_full_precision_at_first() -> None:
    def weights(options: OuterOptions, iterations: int) -> list[Tensor]:
        engine_options = replace(FP32, full_precision_iterations=iterations)
        return run_islands(2, 2, lambda member: trained(member, 6)[1], engine_options, options)

    exact = weights(EXACTLY, 0)
    assert all(map(torch.equal, weights(IN_3_BITS, 6), exact))
    assert not any(map(torch.equal, weights(IN_3_BITS, 4), exact))


@dataclass(frozen=True)
class OwnCodec(CastCodec):
    """Like that of exact values, and not equal to it."""


def test_one_island_keeps_its_values_whatever_codecs_the_program_has() -> None:
    def make(code: Code, dtype: torch.dtype, block_numel: int) -> Codec:
        return OwnCodec(dtype)

    def weights(engine_options: EngineOptions) -> list[Tensor]:
        return run_islands(1, 2, lambda member: trained(member, 6)[1], engine_options, IN_3_BITS)

    assert all(map(torch.equal, weights(replace(FP32, make_codec=make)), weights(FP32)))


@pytest.mark.parametrize("code", [Code(8), Code(8, Rotation.HADAMARD), Code(8, rounding=Rounding.STOCHASTIC), Code.gaussian(3, rounds=1)])
def test_padding_stays_zero(code: Code) -> None:
    def program(member: Member) -> list[bool]:
        trained(member, 8)
        member.engine.finish_updates()
        found = []
        for unit in units_of(member):
            own = unit.layout.slice_shape
            for values in (Regions.of(unit.weight, own), Regions.of(unit.momentum, own), unit.kept.own):
                paddings = unit.layout.paddings(member.outer.links.own_slice, 1)
                found += [bool(values.range(padding.start, padding.stop).any()) for padding in paddings]
            inner = unit.inner.layout
            paddings = inner.paddings(unit.inner.first_slice, 1)
            found += [bool(unit.inner.main_regions().range(padding.start, padding.stop).any()) for padding in paddings]
        return found

    found = [is_filled for of_rank in run_islands(2, 2, program, options=replace(IN_3_BITS, gradient_code=code)) for is_filled in of_rank]
    assert len(found) > 40
    assert not any(found)


@dataclass(frozen=True)
class KeyedCodec(CastCodec):
    """Records the keys that it is given."""

    seen: ClassVar[list[int]] = []

    def with_noise(self, key: int) -> Codec:
        self.seen.append(key)
        return self


def test_stochastic_rounding_draws_other_numbers_on_every_rank_for_every_unit_and_exchange() -> None:
    KeyedCodec.seen.clear()

    def make(code: Code, dtype: torch.dtype, block_numel: int) -> Codec:
        return KeyedCodec(dtype) if code == Code(8) else CastCodec(dtype)

    options = replace(EXACTLY, gradient_code=Code(8), period=1)
    run_islands(2, 2, lambda member: trained(member, 3), replace(FP32, make_codec=make), options)
    # A codec for each link of a ladder, of which a column has one. The last unit, a small one, is all on the first rank of an island.
    of_exchanges = 2 * 3 * (2 * len(UNITS) + 2 * (len(UNITS) - 1))
    assert len(set(KeyedCodec.seen)) == len(KeyedCodec.seen) == of_exchanges


# ---- what is equal, and where


def flat(regions: object) -> Tensor:
    return torch.cat([part.flatten() for part in regions.parts()])  # type: ignore[attr-defined]


class Exchanged(NamedTuple):
    """Of a unit after an exchange: its copy, whether x = c, the error of the own part of the copy, and what was to be added to it."""

    copy: Tensor
    is_copy: bool
    error: Tensor
    change: Tensor


def watched(member: Member, steps: int) -> list[Exchanged]:
    found = []
    for step in range(steps):
        member.train(step)
        numels = [unit.layout.numel for unit in member.engine.trained]
        due = member.outer.options.is_due(numels, member.engine.iteration)
        before = [None if unit is None else flat(unit.kept.own).float() for unit in member.outer.units]
        member.outer.step()
        member.engine.finish_updates()
        for unit, is_due, own in zip(member.outer.units, due, before, strict=True):
            if is_due and unit is not None and own is not None:
                pairs = list(unit._pairs(unit.kept.values))
                is_copy = all(torch.equal(x, copy.float()) for copy, x in pairs)
                found.append(Exchanged(flat(unit.kept.values), is_copy, unit.weight - flat(unit.kept.own), unit.weight - own))
    return found


@pytest.mark.parametrize(("islands", "ranks"), [(2, 2), (3, 1), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_an_exchange_all_islands_have_the_same_weights_to_the_bit_within_one_error_of_the_code(
    islands: int, ranks: int, dtype: torch.dtype
) -> None:
    """Codes of 3 bits have an error of 0.19 of a Gaussian's root mean square; blocks of these small units are no Gaussians."""
    options = EngineOptions(POLICIES[3], dtype=dtype)
    found = run_islands(islands, ranks, lambda member: watched(member, 9), options, IN_3_BITS, pause=random_pauses(3))
    assert len(found[0]) >= 2 * len(UNITS)
    for rank, exchanges in enumerate(found):
        for exchanged, of_first in zip(exchanges, found[rank % ranks], strict=True):
            assert exchanged.is_copy
            assert torch.equal(exchanged.copy, of_first.copy)
            rounding = 2**-8 * 1.1 if dtype is torch.bfloat16 else 0.0  # of a gain of 1
            assert exchanged.error.norm() <= 0.3 * exchanged.change.norm() + rounding * exchanged.error.numel() ** 0.5
    assert any(exchanged.error.any() for exchanged in found[0])


@pytest.mark.parametrize("options", [EXACTLY, IN_3_BITS, replace(IN_3_BITS, overlap_steps=1)], ids=["exact", "3 bits", "late"])
def test_every_stage_has_the_same_bits_also_with_the_optimizer_on_the_host(options: OuterOptions) -> None:
    def weights(policy: Policy, ranks: int) -> list[Tensor]:
        return run_islands(2, ranks, lambda member: trained(member, 6)[1], EngineOptions(policy), options)

    expected = weights(POLICIES[3], 2)
    for stage in (1, 2):
        assert all(map(torch.equal, weights(POLICIES[stage], 2), expected))
    assert all(map(torch.equal, weights(with_offloaded_optimizer(POLICIES[3]), 2), expected))
    alone = weights(POLICIES[3], 1)
    for stage in range(3):
        assert all(map(torch.equal, weights(POLICIES[stage], 1), alone))


@pytest.mark.parametrize("policy", [ZEROPP, with_quantized_gradients(POLICIES[3])], ids=["ZeRO++", "qgZ"])
def test_islands_agree_whatever_codes_they_use_inside(policy: Policy) -> None:
    def program(member: Member) -> Tensor:
        trained(member, 6)
        return outer_weights(member)

    found = run_islands(2, 2, program, EngineOptions(policy, dtype=torch.bfloat16), IN_3_BITS)
    assert all(torch.equal(weights, found[0]) for weights in found)


def test_what_one_island_has_learned_reaches_the_other_in_3_bits_almost_as_exactly() -> None:
    """The weights of both codes differ by a small part of what training has changed."""

    def program(member: Member) -> Tensor:
        trained(member, 16)
        member.outer.take_means()
        return member.weights()

    first = weights_of(small_module())
    exact, coded = (run_islands(2, 1, program, FP32, options)[0] for options in (EXACTLY, IN_3_BITS))
    assert (coded - exact).norm() < 0.35 * (exact - first).norm()


def test_updates_on_the_host_wait_for_the_next_forward_but_those_up_to_a_unit_that_is_due() -> None:
    def program(member: Member) -> list[list[str]]:
        made: list[list[str]] = []
        later = member.engine.optimizer.later
        reach = later.reach

        def reaches(unit: str) -> None:
            made[-1].append(unit)
            reach(unit)

        for step in range(5):
            member.train(step)
            made.append([])
            later.reach = reaches  # type: ignore[method-assign]
            member.outer.step()
            later.reach = reach  # type: ignore[method-assign]
            assert (later._update is None) == (UNITS[-1] in made[-1])
        return made

    options = EngineOptions(with_offloaded_optimizer(POLICIES[3]))
    assert run_islands(2, 1, program, options, replace(IN_3_BITS, start_iteration=1))[0] == [UNITS, [], [], UNITS[:2], UNITS[2:]]


# ---- a step that is skipped, an evaluation


def test_an_island_skips_a_step_for_itself_and_exchanges_what_is_due_all_the_same() -> None:
    def program(member: Member) -> tuple[int, list[float], Tensor]:
        losses = []
        for step in range(8):
            losses.append(member.train(step, spoils=step == 3 and member.outer.island == 1))
            member.outer.step()
        return member.engine.iteration, losses, outer_weights(member)

    found = run_islands(2, 2, program, options=IN_3_BITS)
    assert {iteration for iteration, _, _ in found} == {8}
    assert all(torch.equal(weights, found[0][2]) for _, _, weights in found)
    assert all(weights.isfinite().all() for _, _, weights in found)


@pytest.mark.parametrize("overlap_steps", [0, 1])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_of_an_island_climb_alike_also_where_one_has_no_element_of_a_unit(stage: int, overlap_steps: int) -> None:
    """The first and the last unit are all on the first rank. After a step that is skipped weights are not stale."""

    def program(member: Member) -> Tensor:
        for step in range(9):
            member.train(step, spoils=step in (4, 5) and member.outer.island == 1)
            member.outer.step()
        assert (member.outer.units[0] is None) == (member.outer.units[-1] is None) == (member.engine.rank == 1)
        return outer_weights(member)

    module = nn.Sequential(nn.LayerNorm(WIDTH), *small_module())
    found = run_islands(2, 2, program, EngineOptions(POLICIES[stage]), replace(IN_3_BITS, overlap_steps=overlap_steps), module=module)
    assert all(torch.equal(weights, found[0]) for weights in found)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_evaluation_reads_the_same_weights_everywhere_moves_no_byte_between_islands_and_changes_no_bit(stage: int) -> None:
    def program(member: Member, *, evaluates: bool) -> tuple[list[float], Tensor, list[float], Traffic]:
        seen, losses = [], []
        ledger = member.engine.links.ledger
        for step in range(8):
            if evaluates:
                member.engine.finish_updates()  # an exchange that is under way
                before = ledger.total(Category.OUTER)
                with member.outer.outer_weights(), torch.no_grad():
                    seen.append(loss_of(member.engine.module, samples(99, 0).bfloat16()).item())
                assert ledger.total(Category.OUTER) == before
            losses.append(member.train(step))
            member.outer.step()
        return losses, member.weights(), seen, ledger.total(Category.OUTER)

    engine_options = EngineOptions(POLICIES[stage], dtype=torch.bfloat16)
    with_evaluations = run_islands(2, 2, partial(program, evaluates=True), engine_options, IN_3_BITS)
    without = run_islands(2, 2, partial(program, evaluates=False), engine_options, IN_3_BITS)
    for (losses, weights, seen, traffic), (expected_losses, expected, _, expected_traffic) in zip(with_evaluations, without, strict=True):
        assert losses == expected_losses
        assert torch.equal(weights, expected)
        assert traffic == expected_traffic
        assert seen == with_evaluations[0][2]
        assert len(set(seen)) > 4


def test_after_an_evaluation_before_the_first_step_gradients_are_zeros_still() -> None:
    def program(member: Member) -> float:
        with member.outer.outer_weights():
            pass
        return member.engine.step(RATE).grad_norm

    assert run_islands(2, 2, program) == [0.0] * 4


@pytest.mark.parametrize("fails_at", ["once", "in a forward"])
def test_after_an_error_in_an_evaluation_training_goes_on_with_the_same_bits(fails_at: str) -> None:
    def program(member: Member, *, fails: bool) -> tuple[list[float], Tensor]:
        losses = []
        for step in range(6):
            if fails:
                with pytest.raises(ArithmeticError), member.outer.outer_weights(), torch.no_grad():
                    if fails_at == "in a forward":
                        hook = member.engine.module.get_submodule("1").register_forward_hook(_fail)
                        try:
                            member.engine.module(samples(0, 0))
                        finally:
                            hook.remove()
                    raise ArithmeticError
            losses.append(member.train(step))
            member.outer.step()
        return losses, member.weights()

    failed, plain = (run_islands(2, 2, partial(program, fails=fails), options=IN_3_BITS) for fails in (True, False))
    for (losses, weights), (expected_losses, expected) in zip(failed, plain, strict=True):
        assert losses == expected_losses
        assert torch.equal(weights, expected)


def _fail(*_: object) -> None:
    raise ArithmeticError


def test_nothing_trains_while_outer_weights_are_shown() -> None:
    def program(member: Member) -> bool:
        trained(member, 3)
        before = member.weights()
        with member.outer.outer_weights():
            loss = loss_of(member.engine.module, samples(0, 0))
            for call in (
                lambda: member.engine.backward(loss),
                lambda: member.engine.step(RATE),
                member.outer.step,
                member.outer.take_means,
                lambda: member.outer.outer_weights().__enter__(),
            ):
                with pytest.raises(RuntimeError, match=r"outer_weights\(\) has put other weights in place.*leave its block first"):
                    call()
        return torch.equal(member.weights(), before)

    assert all(run_islands(2, 2, program, options=IN_3_BITS))


def test_closed_outer_steps_refuse_every_call() -> None:
    def program(member: Member) -> None:
        member.outer.close()
        for call in (member.outer.step, member.outer.take_means, lambda: member.outer.outer_weights().__enter__()):
            with pytest.raises(RuntimeError, match="the outer steps are closed"):
                call()

    run_islands(2, 1, program)


def test_weights_are_neither_exchanged_nor_evaluated_between_a_backward_and_its_step() -> None:
    def program(member: Member) -> None:
        member.engine.backward(loss_of(member.engine.module, samples(0, 0)))
        with pytest.raises(RuntimeError, match=r"no update has used; call engine.step\(\) first"):
            member.outer.step()
        with pytest.raises(RuntimeError, match="no update has used"), member.outer.outer_weights():
            pass
        member.engine.step(RATE)
        member.outer.step()

    run_islands(2, 1, program)


# ---- bytes and memory


def payload_bytes(code: Code, shape: SliceShape, element_bytes: int) -> int:
    """Per 256 values a scale of 2 bytes and the codes; then the exact values."""
    blocks = shape.blocks * element_bytes if code.bits is None else next_16(shape.blocks // 256 * 2) + shape.blocks * code.bits // 8
    return next_16(blocks) + next_16(shape.exact * element_bytes)


def next_16(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


@pytest.mark.parametrize(("islands", "ranks"), [(2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize(
    "options", [EXACTLY, IN_3_BITS, replace(IN_3_BITS, difference_code=Code.gaussian(1, rounds=1))], ids=["16", "3/3", "3/1"]
)
def test_each_step_moves_the_payloads_of_its_due_units_between_islands_and_nothing_else(
    options: OuterOptions, islands: int, ranks: int
) -> None:
    def program(member: Member) -> tuple[list[int], list[int], Traffic]:
        ledger, moved, expected = member.engine.links.ledger, [], []
        numels = [unit.layout.numel for unit in member.engine.trained]
        for step in range(8):
            member.train(step)
            before = ledger.total(Category.OUTER)
            member.outer.step()
            member.engine.finish_updates()  # until then an exchange is under way
            moved.append((ledger.total(Category.OUTER) - before).inter_bytes)
            due = options.is_due(numels, step + 1)
            shapes = [unit.layout.slice_shape for unit, is_due in zip(member.outer.units, due, strict=True) if is_due and unit is not None]
            codes = (options.gradient_code, options.difference_code)
            expected.append((islands - 1) * sum(payload_bytes(code, shape, 2) for shape in shapes for code in codes))
        return moved, expected, ledger.total(Category.WEIGHTS, Category.GRADIENTS, Category.CONTROL)

    def alone(member: Member) -> Traffic:
        for step in range(8):
            member.train(step, stream=0)
        return member.engine.links.ledger.total(Category.GRADIENTS, Category.CONTROL)

    for moved, expected, of_island in run_islands(islands, ranks, program, BF16, options):
        assert moved == expected
        assert sum(moved) == 2 * sum(moved[:4])
        assert of_island.inter_bytes == 0


@pytest.mark.parametrize("islands", [1, 2, 4])
def test_each_rank_holds_the_copy_of_its_slice_and_a_part_of_outer_weights_and_momentum(islands: int) -> None:
    def program(member: Member) -> tuple[int, int]:
        numel = sum(unit.layout.slice_numel for unit in units_of(member))
        copies = sum(islands * payload_bytes(EXACT, unit.layout.slice_shape, 2) for unit in units_of(member))
        return member.outer.state_bytes(), 2 * 4 * numel + copies

    for found, expected in run_islands(islands, 2, program, BF16):
        assert found == expected


def test_an_exchange_holds_two_units_beside_what_stays() -> None:
    def program(member: Member) -> int:
        most, begun = 0, set()
        begin, finish = OuterUnit.begin, OuterUnit.finish
        for unit in units_of(member):

            def begins(*arguments: object, unit: OuterUnit = unit, takes_mean: bool) -> None:
                nonlocal most
                begun.add(unit)
                most = max(most, len(begun))
                begin(unit, *arguments, takes_mean=takes_mean)  # type: ignore[arg-type]

            def finishes(unit: OuterUnit = unit) -> Traffic:
                begun.discard(unit)
                return finish(unit)

            unit.begin, unit.finish = begins, finishes  # type: ignore[method-assign, assignment]
        member.outer.take_means()
        assert len(begun) == 2
        member.engine.finish_updates()
        assert not begun
        return most

    assert run_islands(2, 1, program) == [2, 2]


def test_codes_that_are_exact_suit_blocks_of_any_size() -> None:
    run_islands(2, 1, lambda member: member.outer.take_means(), replace(FP32, block_numel=32), EXACTLY)
