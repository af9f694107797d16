"""Checkpoints of islands: saved as one, and loaded in other worlds."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from harness.islands import UNITS, Member, loss_of, run_islands, samples, small_module
from harness.tool import run_tool
from harness.worlds import run_world
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_zpp.checkpoint.island_state import IslandState
from megatron_zpp.checkpoint.manifest import MANIFEST_FILE, DamagedCheckpointError, manifest_of
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.sharded_module import load, save
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.outer.join import join_islands
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.loss_scaler import DynamicLossScaler
from megatron_zpp.zero.policy import POLICIES, ZEROPP
from megatron_zpp.zero.shard import shard

pytestmark = pytest.mark.virtual

STOP, END = 6, 11  # no exchange is due at the stop for some of the units
ITERATION = f"iter_{STOP:07d}"
OPTIONS = OuterOptions(4)
LATE = OuterOptions(3, overlap_steps=1)  # the first two units are late at the stop
BF16 = EngineOptions(POLICIES[3], dtype=torch.bfloat16)


def steps(member: Member, first: int, last: int, *, spoils: Callable[[int], bool] = lambda step: False) -> list[float]:
    losses = []
    for step in range(first, last):
        losses.append(member.train(step, spoils=spoils(step)))
        member.outer.step()
    return losses


def outer_row(member: Member) -> Tensor:
    with member.outer.outer_weights():
        return member.weights()


def moments(member: Member) -> Tensor:
    return torch.cat([values for of_unit in member.engine.optimizer.moments for values in of_unit.values()])


def state(member: Member) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inner weights, moments, outer weights and momentum of this rank's part, and the copies."""
    member.outer.check_open()  # waits for what crosses
    own = [unit for unit in member.outer.units if unit is not None]
    parts = torch.cat([torch.cat([unit.weight, unit.momentum]) for unit in own])
    return member.weights(), moments(member), parts, outer_row(member)


def saved(
    folder: Path, islands: int, ranks: int, engine_options: EngineOptions = BF16, options: OuterOptions = OPTIONS
) -> list[tuple[Tensor, ...]]:
    """What ranks have when they save."""

    def program(member: Member) -> tuple[Tensor, ...]:
        steps(member, 0, STOP)
        save(member.engine, folder, outer=member.outer)
        return state(member)

    return run_islands(islands, ranks, program, engine_options, options)


def loaded(folder: Path, islands: int, ranks: int, engine_options: EngineOptions = BF16) -> list[tuple[Tensor, ...]]:
    def program(member: Member) -> tuple[Tensor, ...]:
        load(member.engine, folder, outer=member.outer)
        return state(member)

    return run_islands(islands, ranks, program, engine_options, OPTIONS)


@pytest.mark.parametrize(
    ("stages", "options"), [((3, 3), OPTIONS), ((1, 3), OPTIONS), ((3, 2), OPTIONS), ((3, 3), LATE), ((3, 1), LATE)], ids=str
)
def test_a_run_that_resumes_with_the_same_islands_has_the_bits_of_one_that_does_not_stop(
    stages: tuple[int, int], options: OuterOptions, tmp_path: Path
) -> None:
    first, second = (EngineOptions(POLICIES[stage], dtype=torch.bfloat16) for stage in stages)

    def unbroken(member: Member) -> tuple[list[float], tuple[Tensor, ...]]:
        return steps(member, 0, END)[STOP:], state(member)

    def resumed(member: Member) -> tuple[list[float], tuple[Tensor, ...]]:
        assert load(member.engine, tmp_path, outer=member.outer).step == STOP
        return steps(member, STOP, END), state(member)

    expected = run_islands(2, 2, unbroken, second, options)
    saved(tmp_path, 2, 2, first, options)
    for (losses, own), (expected_losses, other) in zip(run_islands(2, 2, resumed, second, options), expected, strict=True):
        assert losses == expected_losses
        assert all(map(torch.equal, own, other))


@pytest.mark.parametrize("options", [OPTIONS, LATE], ids=["in time", "late"])
def test_a_save_changes_no_bit_of_a_run(options: OuterOptions, tmp_path: Path) -> None:
    def program(member: Member, *, saves: bool) -> tuple[list[float], tuple[Tensor, ...]]:
        losses = []
        for step in range(7):
            losses += steps(member, step, step + 1)
            if saves:
                save(member.engine, tmp_path, outer=member.outer, keep_last=1)
        return losses, state(member)

    plain, with_saves = (run_islands(2, 2, partial(program, saves=saves), BF16, options) for saves in (False, True))
    for (losses, own), (expected_losses, other) in zip(with_saves, plain, strict=True):
        assert losses == expected_losses
        assert all(map(torch.equal, own, other))


def test_a_run_whose_exchanges_are_in_time_ends_those_that_were_late_at_the_save(tmp_path: Path) -> None:
    def program(member: Member) -> list[bool]:
        load(member.engine, tmp_path, outer=member.outer)
        return [all(torch.equal(x, copy.float()) for copy, x in unit._pairs(unit.kept.values)) for unit in member.outer.units if unit]

    saved(tmp_path, 2, 1, BF16, LATE)
    with CheckpointReader(tmp_path / ITERATION) as reader:
        assert {name.partition(".")[0] for name in reader.manifest.run["late_parameters"]} == set(UNITS[:2])
    assert run_islands(2, 1, program, BF16, OPTIONS) == [[True, True, False, False]] * 2
    assert run_islands(2, 1, program, BF16, LATE) == [[False] * len(UNITS)] * 2


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_load_forgets_what_was_late_before_it(with_optimizer: bool, tmp_path: Path) -> None:
    def program(member: Member, *, trains_on: bool) -> tuple[Tensor, ...]:
        steps(member, 0, 4)  # the last two units are late
        save(member.engine, tmp_path, outer=member.outer, keep_last=1)
        steps(member, 4, STOP if trains_on else 4)
        load(member.engine, tmp_path, outer=member.outer, with_optimizer=with_optimizer)
        member.outer.take_means()
        return state(member)

    back, at_once = (run_islands(2, 2, partial(program, trains_on=trains_on), BF16, LATE) for trains_on in (True, False))
    for found, expected in zip(back, at_once, strict=True):
        assert torch.equal(found[0], back[0][0])
        # Without the optimizer the exchange is that of a later step, whose codes round otherwise.
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0 if with_optimizer else 5e-3)


def test_what_is_saved_without_the_optimizer_is_there_when_it_is_saved() -> None:
    """The exchange that is under way changes the outer weights."""

    def program(member: Member, *, waits: bool) -> Tensor:
        steps(member, 0, STOP)
        if waits:
            member.outer.check_open()
        own = IslandState(member.outer)
        own.manifest(Progress(STOP), {}, with_moments=False)
        return torch.cat([piece.values.flatten() for piece in own.share(with_moments=False).pieces])

    expected = run_islands(2, 2, partial(program, waits=True), BF16, LATE)
    found = run_islands(2, 2, partial(program, waits=False), BF16, LATE, pause=lambda: time.sleep(0.01))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("units", "late"), [(["0.1", "0.3", "1", "2", "3"], ["0.1", "0.3", "1"]), (["0", "1"], ["0", "1"])], ids=str)
def test_other_units_are_late_if_a_parameter_of_theirs_was(units: list[str], late: list[str], tmp_path: Path) -> None:
    saved(tmp_path, 2, 2, BF16, LATE)

    def run(backend: VirtualBackend) -> set[str]:
        island, column = backend.on_islands(2)
        engine = shard(small_module(), units, BF16, backend=island)
        outer = join_islands(engine, LATE, backend=column)
        load(engine, tmp_path, outer=outer)
        found = {unit.name for unit in engine.trained if unit.layout.params[0].spec.name in outer.late_parameters}
        outer.close()
        engine.close()
        return found

    assert all(set(late) <= found for found in run_world((2, 2), run))


def test_every_state_is_stored_once_and_the_weight_is_the_outer_one(tmp_path: Path) -> None:
    found = saved(tmp_path, 2, 2)
    with CheckpointReader(tmp_path / ITERATION) as reader:
        assert list(reader.verify()) == []
        own = [f"{name}/{island}" for island in range(2) for name in ("inner_weight", "exp_avg", "exp_avg_sq")]
        assert set(reader.manifest.states) == {"weight", "outer_momentum", "outer_copy", *own}
        assert reader.manifest.states["outer_copy"] == "BF16"
        names = list(reader.manifest.shapes)

        def whole(stored: str) -> Tensor:
            numels = {name: torch.Size(reader.manifest.shapes[name]).numel() for name in names}
            return torch.cat([reader.read(name, stored, 0, numel).float() for name, numel in numels.items()])

        assert torch.equal(whole("outer_copy"), found[0][3])
        for island in range(2):
            assert torch.equal(whole(f"inner_weight/{island}"), found[2 * island][0])
        parts = torch.cat([parts for _, _, parts, _ in found])  # of all ranks: weights and momentum, with padding
        for stored in ("weight", "outer_momentum"):
            assert torch.isin(whole(stored), parts).all()
            assert not torch.equal(whole(stored), found[0][3])
    assert found[0][3].equal(found[3][3])


def test_tools_read_the_outer_weights(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints", 2, 2)
    inspected = run_tool("inspect_checkpoint", "--load", tmp_path / "checkpoints", "--verify")
    assert inspected.returncode == 0, inspected.stdout + inspected.stderr
    written = run_tool("consolidate_checkpoint", "--load", tmp_path / "checkpoints", "--output", tmp_path / "weights", "--dtype", "float32")
    assert written.returncode == 0, written.stderr
    (file,) = (tmp_path / "weights").glob("*.safetensors")
    found = load_file(file)
    with CheckpointReader(tmp_path / "checkpoints" / ITERATION) as reader:
        assert found.keys() == reader.manifest.shapes.keys()
        assert all(torch.equal(values, reader.weight(name)) for name, values in found.items())


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_same_islands_of_another_number_of_ranks_have_the_same_states(ranks: int, tmp_path: Path) -> None:
    of_two, others = saved(tmp_path, 2, 2), loaded(tmp_path, 2, ranks)
    for island in range(2):
        assert torch.equal(others[ranks * island][0], of_two[2 * island][0])
        assert torch.equal(others[ranks * island][3], of_two[2 * island][3])
    norms = [sum(float(moment.double().square().sum()) for _, moment, _, _ in found) for found in (of_two, others)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (2, 1), (4, 2)])
def test_another_number_of_islands_starts_with_the_mean_of_inner_weights_and_what_is_shared_stays(
    before: int, after: int, tmp_path: Path
) -> None:
    stored, found = saved(tmp_path, before, 1), loaded(tmp_path, after, 1)
    for position in (0, 1):  # inner weights, moments
        expected = torch.stack([of_island[position] for of_island in stored]).sum(dim=0) / before
        for of_island in found:
            torch.testing.assert_close(of_island[position], expected, rtol=1e-6, atol=1e-12)
    for of_island in found:
        assert torch.equal(of_island[3], stored[0][3])
    shared = [torch.cat([parts for _, _, parts, _ in states]).sort().values for states in (stored, found)]
    shared = [values[values != 0] for values in shared]  # paddings differ
    assert torch.equal(*shared)


def engine_alone(program: Callable[[Member], object], engine_options: EngineOptions = BF16) -> list[object]:
    """What `program` returns on each of two ranks that train as one; it uses the engine of the member alone."""

    module = small_module()

    def run(backend: VirtualBackend) -> object:
        engine = shard(copy.deepcopy(module), UNITS, engine_options, backend=backend)
        result = program(Member(engine, None))  # type: ignore[arg-type]
        engine.close()
        return result

    return run_world((1, 2), run)


def test_a_run_without_islands_goes_on_from_their_mean(tmp_path: Path) -> None:
    stored = saved(tmp_path, 2, 2)

    def program(member: Member) -> tuple[Tensor, Tensor, int]:
        load(member.engine, tmp_path)
        return member.weights(), moments(member), member.engine.iteration

    for rank, (weights, own_moments, iteration) in enumerate(engine_alone(program)):  # type: ignore[misc]
        torch.testing.assert_close(weights, (stored[0][0] + stored[2][0]) / 2, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(own_moments, (stored[rank][1] + stored[2 + rank][1]) / 2, rtol=1e-6, atol=1e-12)
        assert iteration == STOP


def test_weights_alone_are_the_outer_ones(tmp_path: Path) -> None:
    stored = saved(tmp_path, 2, 2)

    def program(member: Member) -> Tensor:
        load(member.engine, tmp_path, with_optimizer=False)
        return member.weights()

    weights, _ = engine_alone(program)
    assert isinstance(weights, Tensor)
    assert (weights - stored[0][3]).norm() < 0.02 * weights.norm()
    assert not torch.equal(weights, stored[0][3])  # the copy, which has lost what its code loses


def test_islands_start_from_a_run_without_any_with_its_weights_and_moments_and_no_momentum(tmp_path: Path) -> None:
    def plainly(member: Member) -> tuple[Tensor, Tensor]:
        for step in range(STOP):
            member.engine.backward(loss_of(member.engine.module, samples(step, member.engine.rank).bfloat16()))
            member.engine.step(1e-2)
        save(member.engine, tmp_path)
        return member.weights(), moments(member)

    stored = engine_alone(plainly)

    def program(member: Member) -> tuple[tuple[Tensor, ...], bool]:
        steps(member, 0, 5)  # what it has learned and gathered is forgotten
        load(member.engine, tmp_path, outer=member.outer)
        has_momentum = any(unit.momentum.any() for unit in member.outer.units if unit is not None)
        found = state(member)
        steps(member, STOP, END)
        return found, has_momentum

    for rank, (found, has_momentum) in enumerate(run_islands(2, 2, program, BF16, OPTIONS)):
        weights, of_plain = stored[rank % 2]  # type: ignore[misc]
        assert torch.equal(found[0], weights)
        assert torch.equal(found[1], of_plain)
        assert torch.equal(found[3], weights.bfloat16().float())
        assert not has_momentum


def test_each_island_goes_on_with_its_own_updates_and_loss_scale(tmp_path: Path) -> None:
    options = EngineOptions(POLICIES[3], dtype=torch.float16)

    def program(member: Member, *, loads: bool) -> tuple[int, float]:
        if loads:
            load(member.engine, tmp_path, outer=member.outer)
        else:
            steps(member, 0, STOP, spoils=lambda step: member.outer.island == 1 and step in (1, 2))
            save(member.engine, tmp_path, outer=member.outer)
        return member.engine.optimizer.steps, member.engine.loss_scaler.scale

    def of_islands(*, loads: bool) -> list[tuple[int, float]]:
        return run_islands(2, 2, partial(program, loads=loads), options, OPTIONS, loss_scaler=lambda: DynamicLossScaler(64.0, hysteresis=1))

    expected = 2 * [(STOP, 64.0)] + 2 * [(STOP - 2, 16.0)]
    assert of_islands(loads=False) == expected
    assert of_islands(loads=True) == expected
    # One island goes on with the smaller of the two scales, and with the updates of that island.
    program_of_one = partial(program, loads=True)
    found = run_islands(1, 2, program_of_one, options, OPTIONS, loss_scaler=lambda: DynamicLossScaler(64.0, hysteresis=1))
    assert found == 2 * [(STOP - 2, 16.0)]


def frozen_first() -> nn.Sequential:
    module = small_module()
    module[0].requires_grad_(False)
    return module


def test_frozen_weights_are_stored_once_and_neither_trained_nor_exchanged(tmp_path: Path) -> None:
    def program(member: Member, *, loads: bool) -> tuple[Tensor, int]:
        if loads:
            load(member.engine, tmp_path, outer=member.outer)
        else:
            steps(member, 0, STOP)
            save(member.engine, tmp_path, outer=member.outer)
        return member.weights(), len(member.outer.units)

    stored, found = (run_islands(2, 2, partial(program, loads=loads), BF16, OPTIONS, module=frozen_first()) for loads in (False, True))
    assert [count for _, count in stored] == [len(UNITS) - 1] * 4
    assert all(torch.equal(own, other) for (own, _), (other, _) in zip(found, stored, strict=True))


def test_codes_inside_of_islands_leave_what_is_saved_and_resumed_alike(tmp_path: Path) -> None:
    options = EngineOptions(ZEROPP, dtype=torch.bfloat16)
    stored, found = saved(tmp_path, 2, 2, options), loaded(tmp_path, 2, 2, options)
    assert all(all(map(torch.equal, own, other)) for own, other in zip(found, stored, strict=True))


def test_outer_steps_of_another_engine_are_refused(tmp_path: Path) -> None:
    others: dict[int, Member] = {}

    def program(backend: VirtualBackend) -> None:
        engine = shard(small_module(), UNITS, backend=backend)
        save(engine, tmp_path, outer=others[0].outer)

    run_islands(1, 1, lambda member: others.update({0: member}))
    with pytest.raises(ValueError, match="outer belongs to another engine"):
        run_world((1, 1), program)


def test_joined_engines_save_and_load_as_one_and_not_while_they_show_outer_weights(tmp_path: Path) -> None:
    def program(member: Member) -> None:
        for call in (save, load):
            with pytest.raises(ValueError, match="the engine is joined with those of other islands, and all of them save and load as one"):
                call(member.engine, tmp_path)
        with member.outer.outer_weights(), pytest.raises(RuntimeError, match="leave its block first"):
            save(member.engine, tmp_path, outer=member.outer)
        member.outer.close()
        with pytest.raises(RuntimeError, match="outer steps are closed"):
            save(member.engine, tmp_path, outer=member.outer)
        save(member.engine, tmp_path / f"island {member.outer.island}")

    run_islands(2, 2, program)


def test_a_step_without_its_exchange_is_not_saved(tmp_path: Path) -> None:
    def program(member: Member) -> tuple[Tensor, ...]:
        steps(member, 0, 1)
        member.train(1)
        with pytest.raises(RuntimeError, match="step 2 has had no exchange; call the step.* of the outer steps before a save"):
            save(member.engine, tmp_path, outer=member.outer)
        member.outer.step()
        save(member.engine, tmp_path, outer=member.outer)
        return state(member)

    expected = run_islands(2, 2, program, BF16, OPTIONS)
    for own, other in zip(loaded(tmp_path, 2, 2), expected, strict=True):
        assert all(map(torch.equal, own, other))


def test_what_is_due_at_the_moment_of_a_save_is_not_exchanged_again_after_a_load(tmp_path: Path) -> None:
    def saving(member: Member) -> None:
        steps(member, 0, 8)
        save(member.engine, tmp_path, outer=member.outer)

    def loading(member: Member) -> bool:
        load(member.engine, tmp_path, outer=member.outer)
        before = state(member)
        member.outer.step()
        return all(map(torch.equal, before, state(member)))

    run_islands(2, 2, saving, BF16, OPTIONS)
    assert all(run_islands(2, 2, loading, BF16, OPTIONS))


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda members: members["run"]["islands"].append(members["run"]["islands"][0]), "has 3 islands and no state inner_weight/2"),
        (lambda members: members["run"]["islands"][1].pop("loss_scaler"), "lacks run.islands[1].loss_scaler"),
        (lambda members: members["run"]["islands"][1].update(optimizer_steps=-1), "optimizer_steps must be a whole number"),
        (lambda members: members["run"]["islands"][1].update(optimizer_steps=1 << 62), "has islands[1].optimizer_steps"),
        (lambda members: members["run"].update(islands=[3]), "run.islands"),
    ],
    ids=["too many", "no scaler", "negative", "too large", "no object"],
)
def test_what_a_manifest_says_of_islands_is_checked(change: Callable[[dict[str, object]], object], finding: str, tmp_path: Path) -> None:
    saved(tmp_path, 2, 1)
    folder = tmp_path / ITERATION
    members = json.loads((folder / MANIFEST_FILE).read_text())
    change(members)
    with pytest.raises(DamagedCheckpointError) as error:
        manifest_of(folder, json.dumps(members).encode())
    assert finding in str(error.value)
