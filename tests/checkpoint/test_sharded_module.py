"""save() and load(): any sharded module goes on in any world, and what does not fit is refused alike on every rank."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.codes import lean
from harness.own_modules import RATE, UNITS, FrozenBelow, adapted_vit, loss_of, made, trained_plainly, vit
from harness.worlds import run_world
from torch import Tensor, nn

from megatron_zpp import CheckpointError, UserError, full_weights, load, save, shard
from megatron_zpp.checkpoint import saver
from megatron_zpp.checkpoint.folders import complete_iterations
from megatron_zpp.checkpoint.manifest import marker_json
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.run_lock import Job, take_lock
from megatron_zpp.checkpoint.unfinished import write_pieces
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES, ZEROPP, Policy

pytestmark = pytest.mark.virtual

OPTIONS = EngineOptions(block_numel=256, clip_grad=0.0)
BEFORE, AFTER = 2, 2  # steps

History = list[tuple[float, float]]  # mean loss and norm of the gradient in each step


def sharded(make: Callable[[], nn.Module], policy: Policy = POLICIES[3], backend: VirtualBackend | None = None) -> ZeroEngine:
    return shard(made(make), UNITS[make], replace(OPTIONS, policy=policy), backend=backend)


def trained(engine: ZeroEngine, steps: range) -> History:
    history = []
    for step in steps:
        own = loss_of(engine.module, step, engine.rank, engine.world_size)
        engine.backward(own)
        norm = engine.step(RATE).grad_norm
        history.append((engine.gather_world(own.detach().view(1)).mean().item(), norm))
    return history


def trained_and_saved(make: Callable[[], nn.Module], policy: Policy, shape: tuple[int, int], folder: Path) -> None:
    def program(backend: VirtualBackend) -> None:
        engine = sharded(make, policy, backend)
        trained(engine, range(BEFORE))
        save(engine, folder)
        engine.close()

    run_world(shape, program)


def loaded_and_trained(make: Callable[[], nn.Module], policy: Policy, shape: tuple[int, int], folder: Path) -> History:
    def program(backend: VirtualBackend) -> History:
        engine = sharded(make, policy, backend)
        restored = load(engine, folder)
        assert (restored.step, engine.iteration) == (BEFORE, BEFORE)
        history = trained(engine, range(restored.step, restored.step + AFTER))
        engine.close()
        return history

    return run_world(shape, program)[0]


def unbroken(make: Callable[[], nn.Module], policy: Policy, shape: tuple[int, int]) -> History:
    def program(backend: VirtualBackend) -> History:
        engine = sharded(make, policy, backend)
        history = trained(engine, range(BEFORE + AFTER))
        engine.close()
        return history

    return run_world(shape, program)[0][BEFORE:]


# ---- going on


@pytest.mark.parametrize("make", UNITS)
@pytest.mark.parametrize("stage", list(POLICIES))
def test_what_two_nodes_of_two_ranks_saved_goes_on_in_other_worlds_and_stages_as_in_plain_torch(
    make: Callable[[], nn.Module], stage: int, tmp_path: Path
) -> None:
    trained_and_saved(make, POLICIES[stage], (2, 2), tmp_path)
    expected = trained_plainly(make, BEFORE + AFTER)[0][BEFORE:]
    for shape, other in (((1, 1), (stage + 1) % 4), ((3, 1), stage)):
        found = loaded_and_trained(make, POLICIES[other], shape, tmp_path)
        assert found == [pytest.approx(step, rel=4e-5) for step in expected]


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[3], ZEROPP, lean(3), lean(2)], ids=["0", "3", "ZeRO++", "lean", "lean, stage 2"])
@pytest.mark.parametrize("make", [vit, adapted_vit])
def test_in_the_same_world_nothing_but_time_was_lost(make: Callable[[], nn.Module], policy: Policy, tmp_path: Path) -> None:
    """The same bits: copies that differences are added to are saved as well."""
    trained_and_saved(make, policy, (2, 2), tmp_path)
    assert loaded_and_trained(make, policy, (2, 2), tmp_path) == unbroken(make, policy, (2, 2))


def test_a_save_changes_no_bit(tmp_path: Path) -> None:
    def program(backend: VirtualBackend) -> History:
        engine = sharded(adapted_vit, lean(3), backend)
        history = []
        for step in range(BEFORE + AFTER):
            save(engine, tmp_path, keep_last=1)
            history += trained(engine, range(step, step + 1))
        engine.close()
        return history[BEFORE:]

    assert run_world((2, 2), program)[0] == unbroken(adapted_vit, lean(3), (2, 2))
    assert complete_iterations(tmp_path) == [BEFORE + AFTER - 1]


def test_buffers_and_what_the_program_adds_come_back(tmp_path: Path) -> None:
    extra = {"position": 7, "names": ["ä", None], "rates": {"first": 0.1}}

    def saving(backend: VirtualBackend) -> None:
        engine = sharded(vit, backend=backend)
        engine.module.counts += torch.tensor([2**60 + 1, backend.rank])
        save(engine, tmp_path, 40, extra=extra if backend.rank == 0 else {})
        engine.close()

    def loading(backend: VirtualBackend) -> tuple[int, Mapping[str, Any], list[int]]:
        engine = sharded(vit, backend=backend)
        restored = load(engine, tmp_path)
        engine.close()
        return restored.step, restored.extra, engine.module.counts.tolist()

    run_world((1, 2), saving)
    assert run_world((1, 3), loading) == [(40, extra, [2**60 + 1, 0])] * 3


def test_weights_alone_begin_a_new_run(tmp_path: Path) -> None:
    """With new moments and no steps done, also where the checkpoint has no moments of what is trained now."""
    engine = sharded(FrozenBelow)
    trained(engine, range(BEFORE))
    save(engine, tmp_path)
    weights = dict(full_weights(engine))
    engine.close()
    model = made(FrozenBelow).requires_grad_(True)
    engine = shard(model, UNITS[FrozenBelow], OPTIONS)
    assert load(engine, tmp_path, with_optimizer=False).step == BEFORE
    assert all(torch.equal(weight, weights[path]) for path, weight in full_weights(engine))
    assert (engine.iteration, engine.optimizer.steps) == (0, 0)
    with pytest.raises(CheckpointError, match=r"no optimizer state of 0\.bias, which was frozen there; .*with_optimizer=False"):
        load(engine, tmp_path)
    engine.close()


def test_frozen_weights_in_16_bits_come_back_to_the_bit(tmp_path: Path) -> None:
    def program(backend: VirtualBackend) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        models = [made(FrozenBelow), made(FrozenBelow)]
        for model in models:
            model[0].bfloat16()
        with torch.no_grad():
            models[0][0].weight += 1
        engines = [shard(model, UNITS[FrozenBelow], OPTIONS, backend=other) for model, other in zip(models, (backend, None), strict=True)]
        save(engines[0], tmp_path)
        load(engines[1], tmp_path)
        found = [dict(full_weights(engine)) for engine in engines]
        for engine in engines:
            engine.close()
        return found[0], found[1]

    saved, loaded = run_world((1, 1), program)[0]
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(weight, loaded[path]) for path, weight in saved.items())


def test_a_checkpoint_without_frozen_parameters_is_loaded_where_they_have_their_values(tmp_path: Path) -> None:
    engine = sharded(adapted_vit)
    trained(engine, range(BEFORE))
    save(engine, tmp_path / "all")
    save(engine, tmp_path / "adapters", with_frozen=False)
    expected = trained(engine, range(BEFORE, BEFORE + AFTER))
    paths = {path for path, _ in full_weights(engine, with_frozen=False)}
    engine.close()
    assert paths == {path for path, parameter in made(adapted_vit).named_parameters() if parameter.requires_grad}
    with CheckpointReader(tmp_path / "adapters" / "iter_0000002") as reader:
        assert reader.manifest.shapes.keys() == paths and list(reader.verify()) == []
    engine = sharded(adapted_vit)
    load(engine, tmp_path / "adapters")
    assert trained(engine, range(BEFORE, BEFORE + AFTER)) == expected
    engine.close()
    engine = sharded(vit)
    with pytest.raises(CheckpointError, match="holds another module"):
        load(engine, tmp_path / "adapters")
    engine.close()
    model = made(adapted_vit)
    model.scale = nn.Parameter(torch.ones(2), requires_grad=False)
    engine = shard(model, UNITS[adapted_vit], OPTIONS)
    load(engine, tmp_path / "adapters")
    with pytest.raises(CheckpointError, match=r"holds another module: scale has shape None there and \(2,\) here"):
        load(engine, tmp_path / "all")  # which has all that were frozen, and not this one
    engine.close()


def test_the_name_of_a_shared_parameter_does_not_depend_on_the_units(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.block, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.block(self.embedding(tokens)))

    found = []
    for units in (["embedding", "block", "head"], ["block", "head"], ["block"]):
        torch.manual_seed(1)
        model = Tied()
        engine = shard(model, units, OPTIONS)
        load(engine, tmp_path, missing_ok=True)
        engine.backward(model(torch.arange(5)).square().mean())
        found.append(engine.step(RATE).grad_norm)
        assert {path for path, _ in full_weights(engine)} == {"embedding.weight", "block.weight", "block.bias"}
        assert model.head.weight is model.embedding.weight
        if not (tmp_path / "iter_0000000").exists():
            save(engine, tmp_path, 0)
        engine.close()
    assert found[1] == found[2] != found[0]


def test_every_element_is_stored_once_and_no_moment_of_a_frozen_parameter(tmp_path: Path) -> None:
    trained_and_saved(FrozenBelow, POLICIES[3], (2, 2), tmp_path)
    with CheckpointReader(tmp_path / "iter_0000002") as reader:
        assert list(reader.verify()) == []
        states = {piece.parameter: set(piece.offsets) for piece in reader.manifest.pieces}
    for path, parameter in made(FrozenBelow).named_parameters():
        assert states[path] == ({"weight", "exp_avg", "exp_avg_sq"} if parameter.requires_grad else {"weight"})


def test_a_first_run_finds_nothing_if_that_is_right(tmp_path: Path) -> None:
    engine = sharded(vit)
    assert load(engine, tmp_path / "none", missing_ok=True) is None
    with pytest.raises(CheckpointError, match=r"none holds no checkpoint; name the folder.*missing_ok=True"):
        load(engine, tmp_path / "none")
    for step in (10, 20):
        save(engine, tmp_path, step)
    assert [load(engine, tmp_path, step).step for step in (10, 20, None)] == [10, 20, 20]
    with pytest.raises(CheckpointError, match="step 15: .* holds no checkpoint of this iteration; it holds 10, 20"):
        load(engine, tmp_path, 15, missing_ok=True)
    engine.close()


# ---- refused


def nested(levels: int) -> dict[str, Any]:
    return {"inner": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": -1}, "step is -1; give a whole number, 0 or more"),
        ({"step": 1.5}, "step is 1.5"),
        ({"step": True}, "step is True"),
        ({"keep_last": 0}, "keep_last is 0; give a whole number, 1 or more"),
        ({"keep_last": 1.5}, "keep_last is 1.5"),
        ({"extra": {1: 2}}, "extra would not come back as it is; give .* texts as keys"),
        ({"extra": {"pair": (1, 2)}}, "extra would not come back as it is"),
        ({"extra": nested(40)}, "extra would not come back as it is; .* at most 32 levels deep"),
        ({"with_frozen": False}, r"arguments of save\(\) of ranks \[1\] differ from those of rank 0; give every rank the same$"),
        ({"extra": {"model": nn.Linear(1, 1)}}, "extra cannot be saved as JSON"),
        ({"extra": {"loss": float("nan")}}, "extra cannot be saved as JSON"),
        ({"step": 5}, r"arguments of save\(\) of ranks \[1\] differ"),
    ],
    ids=str,
)
def test_bad_arguments_of_one_rank_are_refused_on_every_rank_and_nothing_is_written(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    def program(backend: VirtualBackend) -> None:
        engine = sharded(vit, backend=backend)
        with pytest.raises(UserError, match=words):
            save(engine, tmp_path, **(arguments if backend.rank else {}))
        save(engine, tmp_path)
        engine.close()

    run_world((1, 2), program)
    assert complete_iterations(tmp_path) == [0]


def broken(folder: Path, how: str) -> None:
    files = {path.name: path for path in (folder / "iter_0000000").iterdir()}
    if how == "weights":
        content = bytearray(files["rank_00001.safetensors"].read_bytes())
        content[-5] ^= 1
        files["rank_00001.safetensors"].write_bytes(content)
    elif how == "manifest":
        files["manifest.json"].write_text(files["manifest.json"].read_text().replace('"iteration": 0', '"iteration": 1'))
    elif how == "other module":
        pass


@pytest.mark.parametrize(
    ("how", "make", "words"),
    [  # of files, and so CheckpointError on every rank, whichever rank has met it
        ("weights", vit, r"rank_00001\.safetensors .*; load an older one with step="),
        ("manifest", vit, r"without the checksum in complete\.json.*; load an older one with step="),
        ("other module", FrozenBelow, r"holds another module: .* has shape .* there and .* here; load it into that one"),
    ],
)
def test_what_cannot_be_loaded_is_refused_alike_on_every_rank(how: str, make: Callable[[], nn.Module], words: str, tmp_path: Path) -> None:
    def saving(backend: VirtualBackend) -> None:
        engine = sharded(vit, backend=backend)
        save(engine, tmp_path)
        engine.close()

    def loading(backend: VirtualBackend) -> str:
        engine = sharded(make, backend=backend)
        with pytest.raises(CheckpointError, match=words) as refused:
            load(engine, tmp_path)
        assert (engine.iteration, engine.optimizer.steps) == (0, 0)
        engine.close()
        return re.sub(r" \(on rank \d\)$", "", str(refused.value))

    run_world((1, 2), saving)
    broken(tmp_path, how)
    assert len(set(run_world((1, 3), loading))) == 1


def test_damage_that_one_rank_meets_leaves_the_optimizer_of_all_as_it_was_and_an_older_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    """Two ranks read a file each, and one of them is damaged."""

    def program(backend: VirtualBackend) -> History:
        engine = sharded(vit, backend=backend)
        trained(engine, range(1))
        save(engine, tmp_path)
        expected = trained(engine, range(1, 3))
        save(engine, tmp_path)
        engine.gather_world(torch.zeros(1))
        if engine.rank == 0:
            file = tmp_path / "iter_0000003" / "rank_00001.safetensors"
            content = bytearray(file.read_bytes())
            content[-5] ^= 1
            file.write_bytes(content)
        engine.gather_world(torch.zeros(1))
        before = (engine.iteration, engine.optimizer.steps, engine.loss_scaler.state())
        with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors"):
            load(engine, tmp_path, with_optimizer=False)
        with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors"):
            load(engine, tmp_path)
        assert (engine.iteration, engine.optimizer.steps, engine.loss_scaler.state()) == before
        assert load(engine, tmp_path, 1).step == 1
        assert trained(engine, range(1, 3)) == expected
        engine.close()
        return expected

    run_world((1, 2), program)


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_a_buffer_of_rank_0_that_cannot_be_saved_is_named_on_every_rank(kind: str, tmp_path: Path) -> None:
    def program(backend: VirtualBackend) -> None:
        engine = sharded(vit, backend=backend)
        if backend.rank == 0:
            value = torch.zeros(2, dtype=torch.complex128) if kind == "complex" else torch.zeros(2, 2).to_sparse()
            engine.module.register_buffer("extra", value)
        with pytest.raises(UserError, match=r"buffer extra \(torch\..*\) cannot be saved; register it with persistent=False"):
            save(engine, tmp_path)
        engine.close()

    run_world((1, 2), program)
    assert not (tmp_path / "iter_0000000").exists()


def test_a_lost_lock_ends_the_save_and_leaves_the_checkpoints_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sharded(vit)
    save(engine, tmp_path, 1)

    def loses(path: Path, *arguments: object) -> Any:
        (tmp_path / "run.lock").unlink()
        return write_pieces(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(saver, "write_pieces", loses)
    with pytest.raises(CheckpointError, match="folder .* is no longer this run's, because run.lock was removed"):
        save(engine, tmp_path, 2)
    assert complete_iterations(tmp_path) == [1]
    engine.close()


def test_what_the_manifest_of_another_program_says_of_the_module_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    engine = sharded(vit)
    save(engine, tmp_path)
    folder = tmp_path / "iter_0000000"
    good = json.loads((folder / "manifest.json").read_text())
    for key, value, words in (
        ("extra", [], "extra must be an object"),
        ("steps", 2**62, "steps must be at most"),
        ("weight_code", None, "weight_code must be a string"),
    ):
        bad = {**good, "run": {**good["run"], "module": {**good["run"]["module"], key: value}}}
        (folder / "manifest.json").write_text(json.dumps(bad))
        (folder / "complete.json").write_text(marker_json(json.dumps(bad)))
        before = dict(full_weights(engine))
        with pytest.raises(CheckpointError, match=words):
            load(engine, tmp_path)
        assert all(torch.equal(weight, before[path]) for path, weight in full_weights(engine))
    engine.close()


def test_a_closed_engine_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    engine = sharded(vit)
    save(engine, tmp_path)
    engine.close()
    for call in (save, load):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            call(engine, tmp_path)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_load_within_a_step_is_refused_and_the_step_goes_on(with_optimizer: bool, tmp_path: Path) -> None:
    """Else gradients of the weights from before would go into the first update."""
    histories = []
    for loads in (False, True):
        engine = sharded(vit)
        save(engine, tmp_path)
        loss = loss_of(engine.module, 0, engine.rank, engine.world_size)
        engine.backward(loss)
        if loads:
            with pytest.raises(RuntimeError, match="gradients have come that no update has used; call engine.step"):
                load(engine, tmp_path, with_optimizer=with_optimizer)
        histories.append((engine.step(RATE).grad_norm, *trained(engine, range(1, 2))))
        engine.close()
    assert histories[0] == histories[1]


def test_a_buffer_of_another_shape_is_named(tmp_path: Path) -> None:
    engine = sharded(vit)
    save(engine, tmp_path)
    engine.close()
    model = made(vit)
    model.counts = torch.zeros(3, dtype=torch.int64)
    engine = shard(model, UNITS[vit], OPTIONS)
    with pytest.raises(CheckpointError, match=r"another module: buffer counts is \[2\] torch.int64 there and \[3\] torch.int64 here"):
        load(engine, tmp_path)
    engine.close()


def test_a_folder_into_which_a_run_saves_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    def program(backend: VirtualBackend) -> None:
        engine = sharded(vit, backend=backend)
        with pytest.raises(CheckpointError, match=r"folder .* is in use by process \d+ .*give another folder, or end that run first"):
            save(engine, tmp_path)
        engine.close()

    lock = take_lock(tmp_path, Job(), lambda _: None)
    run_world((1, 2), program)
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    engine = sharded(vit)
    with pytest.raises(CheckpointError, match="cannot be made"):
        save(engine, tmp_path / "inner")
    engine.close()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.write_text("")
    engine = sharded(vit)
    with pytest.raises(CheckpointError, match=f"{place} cannot be made"):
        save(engine, place)
    engine.close()
