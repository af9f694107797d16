"""Parameters of the whole module are a unit of their own; frozen ones are gathered like others, without gradients and optimizer state."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from harness.closed_forms import INT4, INT8, Features, Unit, step_bytes
from harness.codes import LinkBits, lean
from harness.own_modules import IMAGE, RATE, UNITS, WIDTH, FrozenBelow, ViT, adapted_vit, images_of, loss_of, made, trained_plainly, vit
from harness.worlds import run_world
from torch import Tensor, nn

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Category
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import Use
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.module_plan import ROOT, ModulePlan
from megatron_zpp.zero.policy import POLICIES, ZEROPP, Policy, with_offloaded_optimizer, with_secondary_weights
from megatron_zpp.zero.shard import full_weights, shard

STEPS = 3
OPTIONS = EngineOptions(block_numel=256, clip_grad=0.0)
EXACT = {
    **{f"stage {stage}": POLICIES[stage] for stage in POLICIES},
    "hpZ": with_secondary_weights(POLICIES[3]),
    "offload": with_offloaded_optimizer(POLICIES[3]),
}
CODED = {"ZeRO++": ZEROPP, "lean": lean(3), "lean, stage 2": lean(2)}

History = list[tuple[float, float]]  # mean loss and norm of the gradient in each step
Loss = Callable[[nn.Module, ZeroEngine, int], Tensor]


def loss_of_share(model: nn.Module, engine: ZeroEngine, step: int) -> Tensor:
    return loss_of(model, step, engine.rank, engine.world_size)


def trained(
    model: nn.Module, units: list[str], policy: Policy, backend: VirtualBackend | None = None, loss: Loss = loss_of_share
) -> tuple[History, dict[str, Tensor]]:
    engine = shard(model, units, replace(OPTIONS, policy=policy), backend=backend)
    history = []
    for step in range(STEPS):
        own = loss(model, engine, step)
        engine.backward(own)
        norm = engine.step(RATE).grad_norm
        history.append((engine.gather_world(own.detach().view(1)).mean().item(), norm))
    weights = dict(full_weights(engine))
    engine.close()
    return history, weights


def trained_in_world(
    make: Callable[[], nn.Module], policy: Policy, shape: tuple[int, int], loss: Loss = loss_of_share
) -> tuple[History, dict[str, Tensor]]:
    first, *others = run_world(shape, lambda backend: trained(made(make), UNITS[make], policy, backend, loss))
    assert all(history == first[0] for history, _ in others)
    return first


def check(found: History, expected: History, within: float) -> None:
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=within)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=2 * within)


def check_what_has_changed(weights: dict[str, Tensor], before: nn.Module) -> None:
    """All that is trained, and to the bit nothing that is frozen."""
    for path, first in before.named_parameters():
        assert torch.equal(weights[path], first.float()) is not first.requires_grad


# ---- the same training


@pytest.mark.virtual
@pytest.mark.parametrize("row", EXACT)
@pytest.mark.parametrize("make", UNITS)
def test_losses_and_norms_are_those_of_plain_torch(make: Callable[[], nn.Module], row: str) -> None:
    """Within the rounding of fp32 sums, which the ranks take in another order. Frozen weights are those of before, to the bit."""
    expected, _ = trained_plainly(make, STEPS)
    found, weights = trained_in_world(make, EXACT[row], (2, 2))
    check(found, expected, within=2e-5)
    check_what_has_changed(weights, made(make))


@pytest.mark.virtual
@pytest.mark.parametrize("row", CODED)
@pytest.mark.parametrize("make", UNITS)
def test_coded_rows_stay_near_plain_torch(make: Callable[[], nn.Module], row: str) -> None:
    """Within 5 % of a loss: the widths are those of single blocks, whose scales the class token and a large weight decide alone."""
    expected, _ = trained_plainly(make, STEPS)
    found, weights = trained_in_world(make, CODED[row], (2, 2))
    check(found, expected, within=0.05)
    assert found != trained_in_world(make, EXACT["stage 3"], (2, 2))[0]  # something is coded
    check_what_has_changed(weights, made(make))


@pytest.mark.parametrize("make", UNITS)
def test_a_world_of_one_trains_as_plain_torch(make: Callable[[], nn.Module]) -> None:
    for policy in EXACT.values():
        check(trained(made(make), UNITS[make], policy)[0], trained_plainly(make, STEPS)[0], within=2e-5)


def in_parts(model: nn.Module, images: Tensor) -> Tensor:
    """The forward of ViT without a call of the module itself: what it reads is there from the first unit on."""
    hidden = model.patch(images).flatten(2).transpose(1, 2)
    hidden = torch.cat([model.cls.expand(len(hidden), -1, -1), hidden], 1) + model.pos
    for block in model.blocks:
        hidden = block(hidden)
    return model.head(model.norm(hidden[:, 0]))


def loss_in_parts(model: nn.Module, engine: ZeroEngine, step: int) -> Tensor:
    return loss_of(lambda images: {"logits": in_parts(model, images)}, step, engine.rank, engine.world_size)


def loss_around_an_evaluation(model: nn.Module, engine: ZeroEngine, step: int) -> Tensor:
    with torch.no_grad():
        model(images_of(step))
    loss = loss_of_share(model, engine, step)
    with torch.no_grad():
        model(images_of(step + 1))
    return loss


def loss_of_two_forwards(model: nn.Module, engine: ZeroEngine, step: int) -> Tensor:
    """Two open forwards, joined; the mean is that of one."""
    first, second = (loss_of(model, step, 2 * engine.rank + half, 2 * engine.world_size) for half in range(2))
    return (first + second) / 2


@pytest.mark.virtual
@pytest.mark.parametrize("row", ["stage 2", "stage 3", "hpZ"])
@pytest.mark.parametrize("loss", [loss_in_parts, loss_around_an_evaluation, loss_of_two_forwards])
def test_other_ways_through_a_module_with_parameters_of_its_own_train_it_as_well(loss: Loss, row: str) -> None:
    for make in (vit, adapted_vit):
        found, _ = trained_in_world(make, EXACT[row], (2, 1), loss)
        check(found, trained_plainly(make, STEPS)[0], within=2e-5)


class Tied(nn.Module):
    """A head of the whole module that shares its weight with a unit, and a norm that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IMAGE * IMAGE, WIDTH, bias=False)
        self.middle, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(IMAGE * IMAGE, WIDTH, bias=False)
        self.head.weight = self.first.weight

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.middle(self.norm(self.first(images.flatten(1)))))
        return {"logits": hidden @ self.head.weight}


@pytest.mark.virtual
@pytest.mark.parametrize("row", ["stage 0", "stage 3", "hpZ"])
@pytest.mark.parametrize("units", [["first", "middle"], ["middle"]], ids=["with a unit", "in the whole module"])
def test_a_weight_that_the_whole_module_shares_is_trained_once(units: list[str], row: str) -> None:
    expected, _ = trained_plainly(Tied, STEPS)
    found = run_world((2, 1), lambda backend: trained(made(Tied), units, EXACT[row], backend)[0])
    check(found[0], expected, within=2e-5)


@pytest.mark.virtual
@pytest.mark.parametrize("row", ["stage 2", "stage 3"])
def test_an_input_that_requires_gradients_gets_them_through_frozen_units(row: str) -> None:
    def gradient(model: nn.Module, backward: Callable[[Tensor], None]) -> Tensor:
        images = images_of(0).requires_grad_()
        backward(model(images)["logits"].square().mean())
        assert images.grad is not None
        return images.grad

    def program(backend: VirtualBackend) -> Tensor:
        model = made(FrozenBelow)
        engine = shard(model, UNITS[FrozenBelow], replace(OPTIONS, policy=EXACT[row]), backend=backend)
        found = gradient(model, engine.backward)
        engine.step(RATE)
        check([(loss_of(model, 1).item(), 0.0)], [(trained_plainly_on(0), 0.0)], within=2e-5)
        engine.close()
        return found

    def trained_plainly_on(step: int) -> float:
        model = made(FrozenBelow)
        engine = shard(model, UNITS[FrozenBelow], OPTIONS)  # alone, which other tests compare with plain torch
        engine.backward(model(images_of(step))["logits"].square().mean())
        engine.step(RATE)
        loss = loss_of(model, 1).item()
        engine.close()
        return loss

    expected = gradient(made(FrozenBelow), Tensor.backward)
    for found in run_world((2, 1), program):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-8)


def skipping(left_out: int, model: nn.Module, images: Tensor) -> Tensor:
    """FrozenBelow without one of its frozen units, if left_out names one."""
    first, second, adapted, head = model
    hidden = images.flatten(1)[:, :WIDTH] if left_out == 0 else first(images.flatten(1))
    hidden = hidden if left_out == 1 else second(hidden)
    return head(adapted(torch.tanh(hidden).unsqueeze(1)).squeeze(1))


@pytest.mark.virtual
@pytest.mark.parametrize("left_out", [(1, None), (None, 0), (0, 1)], ids=str)
def test_ranks_that_leave_out_some_frozen_units_do_not_wait_for_each_other_where_inputs_require_gradients(
    left_out: tuple[int | None, int | None],
) -> None:
    def program(backend: VirtualBackend) -> tuple[Tensor, float]:
        model = made(FrozenBelow)
        engine = shard(model, UNITS[FrozenBelow], OPTIONS, backend=backend)
        images = images_of(0).requires_grad_()
        engine.backward(skipping(-1 if left_out[backend.rank] is None else left_out[backend.rank], model, images).square().mean())
        norm = engine.step(RATE).grad_norm
        engine.close()
        assert images.grad is not None
        return images.grad, norm

    plain, norms = [], []
    for rank in range(2):
        model, images = made(FrozenBelow), images_of(0).requires_grad_()
        skipping(-1 if left_out[rank] is None else left_out[rank], model, images).square().mean().backward()
        assert images.grad is not None
        plain.append(images.grad)
        norms.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    mean = torch.cat([(one + other).flatten() / 2 for one, other in zip(*norms, strict=True)]).norm().item()
    for (gradient, norm), expected in zip(run_world((2, 1), program), plain, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-8)
        assert norm == pytest.approx(mean, rel=2e-5)


class TrainedHead(ViT):
    """Nothing but the head is trained, which belongs to the whole module; blocks may be left out."""

    is_short = False

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if not self.is_short:
            return super().forward(images)
        return {"logits": self.head(self.norm(self.cls[:, 0].expand(len(images), -1)))}


def trained_head() -> TrainedHead:
    model = made(vit).requires_grad_(False)
    model.__class__ = TrainedHead
    model.head.requires_grad_(True)
    return model


@pytest.mark.virtual
def test_ranks_may_leave_out_all_units_in_one_of_two_forwards_that_a_loss_joins() -> None:
    def joined(model: nn.Module, rank: int) -> Tensor:
        first = loss_of(model, 0)
        model.is_short = rank == 1
        second = loss_of(model, 1)
        model.is_short = False
        return first + second

    def program(backend: VirtualBackend) -> float:
        model = trained_head()
        engine = shard(model, UNITS[vit], OPTIONS, backend=backend)
        engine.backward(joined(model, backend.rank))
        norm = engine.step(RATE).grad_norm
        engine.close()
        return norm

    plain = trained_head()
    ((joined(plain, 0) + joined(plain, 1)) / 2).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.head.parameters()]).norm().item()  # type: ignore[union-attr]
    assert run_world((2, 1), program) == [pytest.approx(expected, rel=2e-5)] * 2


# ---- what is kept and sent


def frozen_below_units() -> list[Unit]:
    """By unit, the elements of its matrices and vectors, and how often it climbs: where nothing is trained, not for backward."""
    numel, block = IMAGE * IMAGE, 256
    attention = (3 * WIDTH * WIDTH, WIDTH * WIDTH, 2 * WIDTH * WIDTH, 2 * WIDTH * WIDTH)
    return [
        Unit((numel * WIDTH,), WIDTH, 1, block, trains=False),
        Unit((WIDTH * WIDTH,), WIDTH, 1, block, trains=False),
        Unit(attention, 2 * WIDTH + 4 * WIDTH + 2 * WIDTH + WIDTH, 2, block, trains=False),
        Unit((2 * WIDTH, 2 * WIDTH), 0, 2, block),
        Unit((5 * WIDTH,), 5, 1, block),
    ]


@pytest.mark.virtual
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(
    "features",
    [
        *(Features(stage) for stage in range(4)),
        Features(keeps_secondary=True),
        Features(keeps_secondary=True, weights=INT8, gradients=INT4),
        Features(keeps_secondary=True, weights=LinkBits(3), gradients=LinkBits(3, 8), is_lean=True),
        Features(stage=2, weights=LinkBits(3), gradients=LinkBits(3, 8), is_lean=True),
    ],
    ids=str,
)
def test_frozen_units_send_no_gradients_and_their_weights_only_to_rungs_that_are_not_kept(
    features: Features, shape: tuple[int, int]
) -> None:
    """To the byte, from the second step on."""
    grid = Grid.of_nodes(*shape)

    def program(backend: VirtualBackend) -> list[tuple[int, int]]:
        model = made(FrozenBelow)
        engine = shard(model, UNITS[FrozenBelow], replace(OPTIONS, policy=features.policy()), backend=backend)
        ledger, totals = engine.links.ledger, []
        for step in range(STEPS):
            engine.backward(loss_of_share(model, engine, step))
            engine.step(RATE)
            engine.links.lanes.drain()
            totals.append(ledger.total(Category.WEIGHTS, Category.GRADIENTS))
        engine.close()
        steps = [later - earlier for earlier, later in itertools.pairwise(totals)]
        return [(ledger.inter_node_bytes(traffic), traffic.intra_bytes) for traffic in steps]

    expected = step_bytes(features, frozen_below_units(), grid, microbatches=1, element_bytes=4)
    for found in run_world(shape, program):
        assert found == [expected] * (STEPS - 1)


@pytest.mark.parametrize("stage", list(POLICIES))
def test_frozen_parameters_have_a_weight_and_no_other_state(stage: int) -> None:
    """Alone, full rungs rest in no memory in stage 3 between steps, and are there in the others."""
    model = made(FrozenBelow)
    engine = shard(model, UNITS[FrozenBelow], replace(OPTIONS, policy=POLICIES[stage]))
    trained_numel = sum(gradient.layout.numel for gradient in engine.gradients)
    numel = sum(unit.layout.numel for unit in engine.units)
    assert engine.state_bytes().device == 4 * numel + 12 * trained_numel
    assert [unit.name for unit in engine.trained] == ["2", "3"]
    assert [unit.name for unit in engine.units] == ["0", "1", "2 (frozen)", "2", "3"]
    for unit in engine.units:
        assert {parameter.requires_grad for parameter in unit.parameters} == {unit.trains}
    engine.close()


@pytest.mark.virtual
@pytest.mark.parametrize("row", ["stage 0", "stage 3", "ZeRO++", "lean", "offload"])
def test_frozen_weights_rest_in_the_type_that_they_had(row: str) -> None:
    """bf16 here, in half of the bytes; what is trained rests in fp32."""
    policy = {**EXACT, **CODED}[row]

    def half_frozen() -> nn.Module:
        model = made(FrozenBelow)
        model[0].bfloat16()
        model[1].weight.data = model[1].weight.bfloat16()  # its bias is another unit, in fp32
        return model

    def program(backend: VirtualBackend) -> tuple[list[torch.dtype], dict[str, Tensor], float]:
        model = half_frozen()
        engine = shard(model, UNITS[FrozenBelow], replace(OPTIONS, policy=policy, dtype=torch.bfloat16), backend=backend)
        loss = loss_of(lambda images: model(images.bfloat16()), 0)
        engine.backward(loss)
        engine.step(RATE)
        weights, dtypes = dict(full_weights(engine)), [unit.main_weight.dtype for unit in engine.units]
        assert engine.weight_norm() == pytest.approx(torch.stack([weight.norm() for weight in weights.values()]).norm().item(), rel=1e-5)
        engine.close()
        return dtypes, weights, loss.item()

    dtypes, weights, loss = run_world((2, 2), program)[0]
    assert dtypes == [torch.bfloat16, torch.bfloat16, *[torch.float32] * 4]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    check_what_has_changed(weights, half_frozen())
    assert loss == pytest.approx(loss_of(lambda images: half_frozen().bfloat16()(images.bfloat16()), 0).item(), rel=0.05)


def test_backward_is_sure_from_the_first_use_on_that_reads_something_trained() -> None:
    def sure(make: Callable[[], nn.Module]) -> list[tuple[str, bool]]:
        return [(use.module, use.backward_is_sure) for use in ModulePlan.of(made(make), UNITS[make]).uses]

    assert sure(FrozenBelow) == [("0", False), ("1", False), ("2", True), ("3", True)]
    assert sure(adapted_vit) == [("", True), ("patch", True), ("blocks.0", True), ("blocks.1", True)]  # the head is trained
    frozen_root = ViT(torch.nn.Identity, torch.nn.Identity)
    frozen_root.requires_grad_(False)
    assert [use.backward_is_sure for use in ModulePlan.of(frozen_root, ["patch"]).uses] == [False, False]


# ---- refused


def test_a_module_in_which_all_is_frozen_is_refused() -> None:
    with pytest.raises(UserError, match="all parameters are frozen, so there is nothing to train"):
        shard(nn.Sequential(nn.Linear(2, 2)).requires_grad_(False), ["0"])


def test_a_parameter_that_is_trained_or_frozen_only_later_is_named() -> None:
    for path, requires_grad, change in (("0.weight", True, "made to require gradients"), ("3.weight", False, "frozen")):
        model = made(FrozenBelow)
        engine = shard(model, UNITS[FrozenBelow], OPTIONS)
        model.get_parameter(path).requires_grad_(requires_grad)
        loss = loss_of(model, 0)
        with pytest.raises(RuntimeError, match=f"parameter {path} was {change} after shard"):
            engine.backward(loss)
            engine.step(RATE)


@pytest.mark.virtual
def test_ranks_that_freeze_other_parameters_are_refused() -> None:
    def program(backend: VirtualBackend) -> None:
        model = made(vit)
        model.cls.requires_grad_(backend.rank == 0)
        with pytest.raises(UserError, match="arguments of shard.*of ranks .1. differ"):
            shard(model, UNITS[vit], OPTIONS, backend=backend)

    run_world((1, 2), program)


class OwnWeight(ViT):
    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {**super().forward(images), "token": self.cls[0]}


@pytest.mark.parametrize("stage", list(POLICIES))
def test_a_module_that_returns_a_weight_of_its_own_is_named(stage: int) -> None:
    model = OwnWeight()
    shard(model, ["patch"], replace(OPTIONS, policy=POLICIES[stage]))
    with pytest.raises(RuntimeError, match=rf"unit {ROOT[:-1]}.*: a module returns a view of its weights.*\.clone".replace("(", r"\(")):
        model(images_of(0))


@pytest.mark.parametrize("change", ["a step", "other weights"])
def test_a_loss_from_before_a_change_of_weights_is_refused_also_if_only_the_whole_module_is_trained(change: str) -> None:
    model = trained_head()
    engine = shard(model, UNITS[vit], OPTIONS)
    losses = [loss_of(model, 0) for _ in range(2)]
    if change == "a step":
        engine.backward(losses[0])
        engine.step(RATE)
    else:
        engine.weights_changed()
    with pytest.raises(RuntimeError, match=r"computed before the last engine\.step\(\).*compute it again"):
        engine.backward(losses[1])


def test_the_call_of_the_whole_module_is_the_first_of_the_uses() -> None:
    uses = [Use(path, (path,), True) for path in UNITS[vit]]
    with pytest.raises(UserError, match="name it first, because they are made within it"):
        shard(made(vit), UNITS[vit], OPTIONS, uses=[*uses, Use("", (ROOT,), True)])
    with pytest.raises(UserError, match=r"no use reads the units \['\(root\)'\]"):
        shard(made(vit), UNITS[vit], OPTIONS, uses=uses)
    check(
        trained_with_uses([Use("", (ROOT,), True), *uses]),
        trained_plainly(vit, STEPS)[0],
        within=2e-5,
    )


def trained_with_uses(uses: list[Use]) -> History:
    model = made(vit)
    engine = shard(model, UNITS[vit], OPTIONS, uses=uses)
    history = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        engine.backward(loss)
        history.append((loss.item(), engine.step(RATE).grad_norm))
    engine.close()
    return history


# ---- after an error


class Failing(ViT):
    """Fails in the middle of forward, once."""

    fails = False

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        if self.fails:
            self.fails = False
            self.patch(images)
            self.blocks[0](torch.zeros(2, 3, WIDTH)).sum()
            raise ArithmeticError
        return super().forward(images)


@pytest.mark.virtual
@pytest.mark.parametrize("row", ["stage 0", "stage 2", "stage 3", "hpZ"])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_after_an_error_in_forward_on_all_ranks_the_engine_goes_on(row: str, with_gradients: bool) -> None:
    def loss(model: nn.Module, engine: ZeroEngine, step: int) -> Tensor:
        if isinstance(model, Failing):
            model.fails = True
            with torch.set_grad_enabled(with_gradients), pytest.raises(ArithmeticError):
                model(images_of(step))
        return loss_of_share(model, engine, step)

    def failing() -> nn.Module:
        model = made(vit)
        model.__class__ = Failing
        return model

    found = run_world((2, 1), lambda backend: trained(failing(), UNITS[vit], EXACT[row], backend, loss)[0])
    check(found[0], trained_plainly(vit, STEPS)[0], within=2e-5)
