"""Modules of other people, sharded, train as in plain torch, or are refused by name before a wrong number arises."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from harness.worlds import run_world
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.schedule import Prefetch
from megatron_zpp.zero.shard import shard

WIDTH, LAYERS, STEPS, RANKS = 16, 4, 3, 2
RATE = 1e-2
UNITS = [str(layer) for layer in range(LAYERS)]
OPTIONS = EngineOptions(POLICIES[3], block_numel=32, clip_grad=0.0)
NOT_AHEAD = Prefetch(0, 0)

Loss = Callable[[nn.Module, Tensor, int], Tensor]  # of (module, input, rank)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Skipped(Block):
    """Returns its input itself while it is skipped."""

    is_skipped = False

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if self.is_skipped else super().forward(hidden)


class View(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).view(-1, 4, WIDTH // 4).flatten(1)


class InPlace(Block):
    """Writes to what the module before it has returned."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden += self.up.bias
        return self.down(hidden)


class Auxiliary(Block):
    """Keeps a loss of its own, which is added to that of the model."""

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        self.loss = self.down(self.up(hidden)).square().mean()
        return output


class InTuple(Block):
    def forward(self, hidden: Tensor) -> tuple[Any, ...]:
        output = super().forward(hidden)
        return output, None, {"inner": [output.sum(-1)], "count": 3}


class Twice(Block):
    """Returns one tensor in two places."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output = super().forward(hidden)
        return output, output


class Keeping(Block):
    """Keeps what it returns."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.kept = super().forward(hidden)
        return self.kept


class Reentrant(Block):
    """Uses a layer in two parts that are recomputed on their own."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = checkpoint(self.up, hidden.requires_grad_(), use_reentrant=True)
        return self.down(checkpoint(self.up, hidden, use_reentrant=True))


class InObject(Block):
    @dataclass
    class Output:
        hidden: Tensor

    def forward(self, hidden: Tensor) -> Output:
        return self.Output(super().forward(hidden))


class OwnWeight(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.up.weight[: len(hidden)]


class LeavingOut(nn.Sequential):
    """Leaves out some of its modules."""

    left_out: Sequence[int] = ()

    def forward(self, hidden: Tensor) -> Tensor:
        for index, block in enumerate(self):
            hidden = hidden if index in self.left_out else block(hidden)
        return hidden


class WithoutGradients(nn.Sequential):
    """Calls some of its modules under no_grad."""

    without: Sequence[int] = ()

    def forward(self, hidden: Tensor) -> Tensor:
        for index, block in enumerate(self):
            with torch.set_grad_enabled(index not in self.without):
                added = block(hidden)
            hidden = hidden + added
        return hidden


class Clamping(Block):
    """Writes to a weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(hidden)


class InList(Block):
    """Keeps a parameter where shard() does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [self.up.bias]

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.scales[0]


def chain(*kinds: type[Block]) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(kind() for kind in kinds))


def with_hooks_before() -> nn.Sequential:
    model = chain(*[Block] * LAYERS)
    for block in model:
        block.register_forward_pre_hook(lambda block, inputs: (inputs[0] * (1 + block.up.bias.square().mean()),))
    return model


def with_normed_weights() -> nn.Sequential:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older form, which computes the weight in a hook
        return nn.Sequential(*(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)))


def loss_of(model: nn.Module, hidden: Tensor, rank: int) -> Tensor:
    return model(hidden).square().mean()


def loss_of_parts(model: nn.Module, hidden: Tensor, rank: int) -> Tensor:
    total = torch.zeros(())
    for block in model:
        hidden, _, rest = block(hidden)
        total = total + rest["inner"][0].square().mean()
    return hidden.square().mean() + total


def loss_of_twice(model: nn.Module, hidden: Tensor, rank: int) -> Tensor:
    for block in model:
        hidden, same = block(hidden)
        hidden *= 2
        hidden = hidden + same
    return hidden.square().mean()


def loss_with_auxiliary(model: nn.Module, hidden: Tensor, rank: int) -> Tensor:
    return loss_of(model, hidden, rank) + sum(block.loss for block in model)


def loss_after_skips(skips: tuple[tuple[int, ...], tuple[int, ...]], model: nn.Module, hidden: Tensor, rank: int) -> Tensor:
    for index, block in enumerate(model):
        block.is_skipped = index in skips[rank]
    return loss_of(model, hidden, rank)


def loss_without(left_out: tuple[tuple[int, ...], tuple[int, ...]], model: nn.Module, hidden: Tensor, rank: int) -> Tensor:
    for index, block in enumerate(model):
        hidden = hidden if index in left_out[rank] else block(hidden)
    return hidden.square().mean()


def loss_after_evaluations(left_out: Sequence[Sequence[Sequence[int]]], model: LeavingOut, hidden: Tensor, rank: int) -> Tensor:
    """left_out: by rank, the modules left out in an evaluation, in a forward, and in two evaluations before its backward."""
    before, in_training, *after = left_out[rank]
    with torch.no_grad():
        model.left_out = before
        model(hidden)
    model.left_out = in_training
    loss = model(hidden).square().mean()
    for model.left_out in after:
        with torch.no_grad():
            model(hidden)
    return loss


def loss_in_part_without_gradients(without: Sequence[Sequence[int]], model: WithoutGradients, hidden: Tensor, rank: int) -> Tensor:
    model.without = without[rank]
    return model(hidden).square().mean()


def loss_of_recomputed(model: nn.Module, hidden: Tensor, rank: int) -> Tensor:
    for block in model:
        hidden = checkpoint(block, hidden, use_reentrant=False)
    return hidden.square().mean()


def loss_after_inference(model: nn.Module, hidden: Tensor, rank: int) -> Tensor:
    with torch.inference_mode():
        model(hidden + 1)
    return loss_of(model, hidden, rank)


def of_transformers(kind: str, **sizes: int | bool) -> nn.Module:
    """A causal model of two layers, whose decoder is `model`, with layers that are recomputed."""
    import transformers  # takes a second, and every worker imports this file

    config = getattr(transformers, f"{kind}Config")(
        **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **sizes}
    )
    torch.manual_seed(1)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this version has a new name for it as well
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_of_ids(model: nn.Module, hidden: Tensor, rank: int) -> Tensor:
    ids = (1000 * hidden.abs()).long() % 64
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def sample(step: int, rank: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained_plainly(model: nn.Module, loss: Loss) -> list[tuple[float, float]]:
    """Mean loss over the ranks and norm of the gradient in each step."""
    adam = AdamOptions()
    decays = [[parameter for parameter in model.parameters() if (parameter.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    groups = [{"params": decays[0], "weight_decay": adam.weight_decay}, {"params": decays[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(adam.beta1, adam.beta2), eps=adam.eps)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mean = torch.stack([loss(model, sample(step, rank), rank) for rank in range(RANKS)]).mean()
        mean.backward()
        norms = torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None])
        history.append((mean.item(), norms.norm().item()))
        optimizer.step()
    return history


def trained_sharded(
    make: Callable[[], nn.Module], loss: Loss, prefetch: Prefetch, shape: tuple[int, int], units: Sequence[str] = UNITS
) -> list[tuple[float, float]]:
    models = [make() for _ in range(RANKS)]

    def program(backend: VirtualBackend) -> list[tuple[float, float]]:
        model = models[backend.rank]
        engine = shard(model, units, EngineOptions(POLICIES[3], block_numel=32, clip_grad=0.0, prefetch=prefetch), backend=backend)
        history = []
        for step in range(STEPS):
            own = loss(model, sample(step, backend.rank), backend.rank)
            engine.backward(own)
            norm = engine.step(RATE).grad_norm
            history.append((engine.gather_world(own.detach().view(1)).mean().item(), norm))
        engine.close()
        return history

    first, second = run_world(shape, program)
    assert first == second
    return first


def skips(*of_ranks: tuple[int, ...]) -> tuple[Callable[[], nn.Module], Loss]:
    return partial(chain, *[Skipped] * LAYERS), partial(loss_after_skips, of_ranks)


@pytest.mark.virtual
@pytest.mark.parametrize(("prefetch", "shape"), [(Prefetch(), (1, RANKS)), (NOT_AHEAD, (RANKS, 1))], ids=["ahead", "not ahead, two nodes"])
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        pytest.param(*skips((0,), (0,)), id="the first returns its input"),
        pytest.param(*skips((1, 2), (1, 2)), id="two neighbours return their inputs"),
        pytest.param(*skips((3,), (3,)), id="the last returns its input"),
        pytest.param(*skips((2,), (1,)), id="other ones on each rank return their inputs"),
        pytest.param(partial(chain, View, InPlace, View, InPlace), loss_of, id="views, which the next module writes to"),
        pytest.param(partial(chain, *[Auxiliary] * LAYERS), loss_with_auxiliary, id="losses beside the output"),
        pytest.param(partial(chain, *[InTuple] * LAYERS), loss_of_parts, id="tensors in tuples, dictionaries and lists"),
        pytest.param(partial(chain, *[Twice] * LAYERS), loss_of_twice, id="one tensor returned twice, then written to"),
        pytest.param(with_hooks_before, loss_of, id="hooks that read weights"),
        pytest.param(with_normed_weights, loss_of, id="weights computed in hooks"),
        pytest.param(partial(chain, *[Block] * LAYERS), loss_of_recomputed, id="recomputed"),
        pytest.param(partial(chain, *[Block] * LAYERS), loss_after_inference, id="inference mode between steps"),
    ],
)
def test_losses_and_norms_are_those_of_plain_torch(
    make: Callable[[], nn.Module], loss: Loss, prefetch: Prefetch, shape: tuple[int, int]
) -> None:
    """Within the rounding of fp32 sums, which the ranks take in another order."""
    expected, found = trained_plainly(make(), loss), trained_sharded(make, loss, prefetch, shape)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=2e-5)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=2e-5)


@pytest.mark.virtual
@pytest.mark.parametrize("prefetch", [Prefetch(), NOT_AHEAD], ids=["ahead", "not ahead"])
@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param(((), (7,)), id="the last"),
        pytest.param(((4, 5, 6), ()), id="three neighbours"),
        pytest.param(((0, 1, 2, 3), ()), id="the first ones"),
        pytest.param(((1, 2, 6, 7), (0, 3, 4)), id="other ones on each rank"),
    ],
)
def test_modules_that_a_rank_does_not_call_leave_no_rank_waiting(
    left_out: tuple[tuple[int, ...], tuple[int, ...]], prefetch: Prefetch
) -> None:
    """With more modules than descents that may be under way."""
    make, loss, units = partial(chain, *[Block] * 8), partial(loss_without, left_out), [str(layer) for layer in range(8)]
    expected, found = trained_plainly(make(), loss), trained_sharded(make, loss, prefetch, (RANKS, 1), units)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=2e-5)


@pytest.mark.virtual
@pytest.mark.parametrize("prefetch", [Prefetch(), NOT_AHEAD], ids=["ahead", "not ahead"])
@pytest.mark.parametrize("in_training", [((3,), ()), ((1, 2, 3), (0, 2))], ids=["the last", "all but the first"])
def test_the_forward_of_a_module_ends_alike_on_ranks_that_leave_out_its_last_parts(
    in_training: tuple[tuple[int, ...], tuple[int, ...]], prefetch: Prefetch
) -> None:
    """Although evaluations, which leave out others, come before its backward."""
    first, second = in_training
    loss = partial(loss_after_evaluations, (((2, 3), first, (3,), ()), ((), second, (0, 1, 2, 3), (1,))))

    def make() -> nn.Module:
        return LeavingOut(*chain(*[Block] * LAYERS))

    expected, found = trained_plainly(make(), loss), trained_sharded(make, loss, prefetch, (RANKS, 1))
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=2e-5)


@pytest.mark.virtual
@pytest.mark.parametrize("without", [((), (0, 1)), ((2,), (1, 3))], ids=["the first on one rank", "other ones on each rank"])
def test_modules_that_a_rank_calls_without_gradients_leave_no_rank_waiting(without: Sequence[Sequence[int]]) -> None:
    loss = partial(loss_in_part_without_gradients, without)

    def make() -> nn.Module:
        return WithoutGradients(*chain(*[Block] * LAYERS))

    expected, found = trained_plainly(make(), loss), trained_sharded(make, loss, Prefetch(), (RANKS, 1))
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=2e-5)


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Llama", {"num_key_value_heads": 2}),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}),
        ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    ],
)
def test_models_of_transformers_have_the_losses_and_norms_of_plain_torch(kind: str, sizes: dict[str, int | bool]) -> None:
    make = partial(of_transformers, kind, **sizes)
    units = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    expected, found = trained_plainly(make(), loss_of_ids), trained_sharded(make, loss_of_ids, Prefetch(), (RANKS, 1), units)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=2e-5)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=2e-5)


def test_units_that_are_compiled_after_they_were_sharded_have_the_same_bits() -> None:
    """Each is one graph, without the engine's hooks."""

    def losses(*, is_compiled: bool) -> list[float]:
        model, engine = sharded(Block, Block)
        for block in model if is_compiled else ():
            block.compile(backend="eager", fullgraph=True)
        found = []
        for step in range(2):
            loss = loss_of(model, sample(step, 0), 0)
            engine.backward(loss)
            found += [loss.item(), engine.step(RATE).grad_norm]
        engine.close()
        return found

    assert losses(is_compiled=True) == losses(is_compiled=False)


# ---- refused


def sharded(*kinds: type[Block]) -> tuple[nn.Sequential, ZeroEngine]:
    model = chain(*kinds)
    return model, shard(model, [str(index) for index in range(len(kinds))], OPTIONS)


def test_a_gradient_of_another_backward_is_refused_where_weights_stay_between_uses() -> None:
    model = chain(Block)
    engine = shard(model, ["0"], replace(OPTIONS, policy=POLICIES[2]))
    model(torch.ones(2, WIDTH))
    with pytest.raises(RuntimeError, match=r"call engine.backward\(loss\) instead of loss.backward\(\)"):
        model[0].up.weight.norm().backward()
    engine.close()


def in_two_ranks(check: Callable[[nn.Sequential, ZeroEngine], None], prefetch: Prefetch = Prefetch()) -> None:
    models = [chain(Block, Block) for _ in range(RANKS)]

    def program(backend: VirtualBackend) -> None:
        check(models[backend.rank], shard(models[backend.rank], UNITS[:2], replace(OPTIONS, prefetch=prefetch), backend=backend))

    run_world((1, RANKS), program)


@pytest.mark.virtual
def test_a_gradient_that_comes_without_passing_an_output_is_refused() -> None:
    def check(model: nn.Sequential, engine: ZeroEngine) -> None:
        inner: list[Tensor] = []
        model[0].up.register_forward_hook(lambda module, inputs, output: inner.append(output))
        model(sample(0, 0))
        with pytest.raises(RuntimeError, match=r"the gradient of 0\.up\.\w+ was computed without the unit's weights"):
            engine.backward(inner[0].square().mean())

    in_two_ranks(check)


@pytest.mark.virtual
def test_recomputation_that_is_entered_before_the_backward_names_the_argument_to_change() -> None:
    def check(model: nn.Sequential, engine: ZeroEngine) -> None:
        hidden = sample(0, 0).requires_grad_()
        for block in model:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        with pytest.raises(RuntimeError, match="unit 1: its full rung is stale.*use_reentrant=False"):
            engine.backward(hidden.square().mean())

    in_two_ranks(check)


@pytest.mark.virtual
def test_units_that_are_recomputed_together_are_told_how_to_recompute() -> None:
    def check(model: nn.Sequential, engine: ZeroEngine) -> None:
        with pytest.raises(RuntimeError, match="unit 0: its full rung is stale.*recompute unit by unit"):
            engine.backward(checkpoint(model, sample(0, 0), use_reentrant=False).square().mean())

    in_two_ranks(check, NOT_AHEAD)


def test_a_module_that_returns_its_own_weights_is_named() -> None:
    model, _ = sharded(OwnWeight)
    with pytest.raises(RuntimeError, match=r"unit 0: a module returns a view of its weights.*\.clone\(\)"):
        model(sample(0, 0))


def test_writing_to_what_a_module_returned_and_keeps_is_refused() -> None:
    model, engine = sharded(Keeping, Block)
    hidden = model[0](sample(0, 0))
    hidden *= 2
    with pytest.raises(RuntimeError, match=r"written to in place while something else.*\.clone\(\)"):
        engine.backward(model[1](hidden).square().mean() + model[0].kept.mean())


def test_a_gradient_that_comes_twice_in_one_backward_is_refused() -> None:
    model, engine = sharded(Reentrant)
    with pytest.raises(RuntimeError, match=r"0\.up\.\w+ came twice in one backward.*use_reentrant=False"):
        engine.backward(loss_of(model, sample(0, 0), 0))


def test_a_loss_from_before_the_last_step_is_refused() -> None:
    model, engine = sharded(Block)
    losses = [loss_of(model, sample(0, 0), 0) for _ in range(2)]
    engine.backward(losses[0])
    engine.step(RATE)
    with pytest.raises(RuntimeError, match=r"computed before the last engine\.step\(\).*compute it again"):
        engine.backward(losses[1])


def test_casts_that_autocast_keeps_from_an_earlier_forward_are_refused() -> None:
    model, engine = sharded(Block, Block)
    with torch.autocast("cpu", torch.bfloat16):
        engine.backward(loss_of(model, sample(0, 0), 0), microbatches=2, is_last_microbatch=False)
        with pytest.raises(RuntimeError, match="enter torch.autocast anew for every forward"):
            engine.backward(loss_of(model, sample(0, 0), 0), microbatches=2)


@pytest.mark.parametrize("add", [nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook])
def test_hooks_of_parameters_are_refused_before_they_would_be_lost(add: Callable[[nn.Parameter, Callable[[Tensor], None]], object]) -> None:
    model = chain(Block)
    add(model[0].up.weight, lambda gradient: None)
    with pytest.raises(UserError, match=r"parameter 0\.up\.weight has hooks.*add hooks after shard\(\)"):
        shard(model, ["0"])


def test_an_output_that_could_hide_tensors_is_named() -> None:
    model, _ = sharded(InObject)
    with pytest.raises(RuntimeError, match="InObject, the module of a use, returns Output; it must return a tensor"):
        model(sample(0, 0))


def test_a_parameter_that_is_frozen_later_is_named() -> None:
    model, engine = sharded(Block)
    model[0].up.weight.requires_grad_(False)
    engine.backward(loss_of(model, sample(0, 0), 0))
    with pytest.raises(RuntimeError, match=r"parameter 0\.up\.weight was frozen after shard\(\)"):
        engine.step(RATE)


@pytest.mark.parametrize("stage", list(POLICIES))
def test_no_module_in_a_sharded_one_gives_or_takes_a_state_dict(stage: int) -> None:
    model = chain(Block)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    shard(model, ["0"], EngineOptions(POLICIES[stage]))
    for module in (model, model[0], model[0].up):
        with pytest.raises(RuntimeError, match="full_weights"):
            module.state_dict()
    with pytest.raises(RuntimeError, match=r"cannot load any; load them before shard\(\)"):
        model.load_state_dict(values)


def test_a_write_to_a_parameter_which_its_main_weight_would_not_get_is_refused() -> None:
    model, engine = sharded(Clamping)
    engine.backward(loss_of(model, sample(0, 0), 0))
    with pytest.raises(RuntimeError, match=r"parameter 0\.up\.weight was written to after shard\(\)"):
        engine.step(RATE)


def test_a_gradient_of_a_parameter_that_shard_has_replaced_is_refused() -> None:
    model, engine = sharded(InList)
    with pytest.raises(RuntimeError, match=r"parameter 0\.up\.bias was replaced by shard\(\), and something reads the old one"):
        engine.backward(loss_of(model, sample(0, 0), 0))


def test_a_loss_through_modules_of_two_engines_is_refused() -> None:
    (model, engine), (other, _) = sharded(Block), sharded(Block)
    with pytest.raises(RuntimeError, match=r"modules of two engines.*shard one of them"):
        engine.backward(loss_of(other, model(sample(0, 0)), 0))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_sharded_module_is_not_copied_without_its_weights(copied: Callable[[nn.Module], object]) -> None:
    model, engine = sharded(Block)
    with pytest.raises(RuntimeError, match="a sharded module cannot be copied or saved.*full_weights"):
        copied(model)
    engine.close()
    with pytest.raises(RuntimeError, match="its engine is closed; read full_weights"):
        copied(model)
