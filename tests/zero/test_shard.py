"""The public door: a module that goes through it trains as the engine and as plain torch train it, and bad input is refused alike."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness.example_runs import error_without_local_world_size, reminders_of_a_refused_module, said_at_the_end
from harness.rank_pool import RankPool
from harness.small_engine import LEARNING_RATE, Job, ModelShape, global_batch, plain_model, train_world
from harness.worlds import run_world
from torch import Tensor, nn

from megatron_zpp.comm.backend import Backend, VirtualBackend
from megatron_zpp.comm.code import Code
from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.codecs import BlockCodec, CastCodec, Codec, make_codec
from megatron_zpp.ops import extension
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.specs import Use
from megatron_zpp.system.user_error import UserError
from megatron_zpp.zero.adam import AdamOptions
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.loss_scaler import ConstantLossScaler, DynamicLossScaler
from megatron_zpp.zero.policy import POLICIES, ZEROPP, Policy, with_offloaded_optimizer, with_quantized_gradients
from megatron_zpp.zero.schedule import Prefetch
from megatron_zpp.zero.shard import _load_kernels, full_weights, shard

UNITS = ["embedding", "blocks.0", "blocks.1", "final"]
OPTIONS = EngineOptions(block_numel=32, clip_grad=0.3)
# The tied weight is handed to the head as an argument, which no shared parameter shows.
USES = tuple(Use(unit, (unit,) if unit != "final" else ("final", "embedding"), unit != "embedding") for unit in UNITS)


class Tied(nn.Module):
    """A head that shares the parameter of the embedding, and has none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 12)
        self.inner = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh())
        self.head = nn.Linear(12, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden + self.inner(hidden))


with torch.random.fork_rng():
    torch.manual_seed(3)
    TIED = Tied()


def tied() -> Tied:
    return copy.deepcopy(TIED)  # torch's generator is shared by the ranks of a virtual world


def tied_loss(model: nn.Module, step: int, rows: slice = slice(None)) -> Tensor:
    tokens, labels = global_batch(step)
    return nn.functional.cross_entropy(model(tokens[rows]).flatten(0, 1), labels[rows].flatten())


# ---- the same training


@pytest.mark.virtual
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 2)], ids=str)
def test_a_module_through_the_door_has_the_bits_of_an_engine_made_by_hand(shape: tuple[int, int]) -> None:
    def program(backend: VirtualBackend, policy: Policy) -> list[tuple[float, float]]:
        model = plain_model(ModelShape())
        engine = shard(model, UNITS, replace(OPTIONS, policy=policy), uses=USES, backend=backend)
        history = []
        for step in range(3):
            tokens, labels = global_batch(step)
            samples = len(tokens) // engine.world_size
            mine = slice(engine.rank * samples, (engine.rank + 1) * samples)
            loss = model(tokens[mine], labels[mine])
            engine.backward(loss)
            history.append((loss.item(), engine.step(LEARNING_RATE).grad_norm))
        engine.close()
        return history

    for policy in (*POLICIES.values(), ZEROPP):
        found = run_world(shape, lambda backend: program(backend, policy))  # noqa: B023
        assert found == train_world(shape, Job(policy))


@pytest.mark.parametrize("stage", list(POLICIES))
def test_a_world_of_one_trains_as_torch_does(stage: int) -> None:
    """Gradients have the same bits without clipping. torch's fused AdamW may round otherwise in the rest of a view that does not fill its
    vectors, and views are cut otherwise: by 2^-24 of a weight per step, so after 5 steps through 3 layers the loss is within
    5 x 3 x 2^-24 = 9e-7 of itself."""
    plain, model = tied(), tied()
    adam = AdamOptions()
    groups = [
        {"params": [parameter for parameter in plain.parameters() if (parameter.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, adam.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    engine = shard(model, ["embedding", "inner", "head"], EngineOptions(POLICIES[stage], clip_grad=0.0))
    for step in range(5):
        expected, found = tied_loss(plain, step), tied_loss(model, step)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        engine.backward(found)
        engine.step(LEARNING_RATE)
    with torch.no_grad():
        assert tied_loss(model, 9).item() == pytest.approx(tied_loss(plain, 9).item(), rel=1e-6)
    engine.close()


@pytest.mark.virtual
@pytest.mark.parametrize("partition_ranks", [1, 2])
def test_shared_parameters_have_the_same_bits_in_all_stages(partition_ranks: int) -> None:
    def program(backend: VirtualBackend, policy: Policy) -> list[float]:
        model = tied()
        engine = shard(model, ["embedding", "inner", "head"], replace(OPTIONS, policy=policy), backend=backend)
        assert model.head.weight is model.embedding.weight
        found = []
        for step in range(3):
            loss = tied_loss(model, step, slice(backend.rank, None, engine.world_size))
            engine.backward(loss)
            found += [loss.item(), engine.step(LEARNING_RATE).grad_norm]
        engine.close()
        return found

    grid = Grid(4, ranks_per_node=2, partition_ranks=partition_ranks)
    rows = [run_world(grid, lambda backend: program(backend, policy)) for policy in POLICIES.values()]  # noqa: B023
    assert rows[0] == rows[1] == rows[2] == rows[3]


@pytest.mark.virtual
@pytest.mark.parametrize("stage", [0, 3])
def test_full_weights_are_the_first_values_until_a_step_changes_them(stage: int) -> None:
    def program(backend: VirtualBackend) -> bool:
        model = plain_model(ModelShape())
        first = copy.deepcopy(model.state_dict())
        engine = shard(model, UNITS, replace(OPTIONS, policy=POLICIES[stage]), uses=USES, backend=backend)
        gathered = dict(full_weights(engine))
        are_first = gathered.keys() == first.keys() and all(torch.equal(gathered[path], first[path]) for path in first)
        tokens, labels = global_batch(0)
        engine.backward(model(tokens, labels))
        engine.step(LEARNING_RATE)
        changed = all(not torch.equal(weight, first[path]) for path, weight in full_weights(engine))
        engine.close()
        return are_first and changed

    assert all(run_world((2, 2), program))


@pytest.mark.virtual
def test_a_module_on_the_meta_device_gets_the_values_of_its_initializer() -> None:
    def program(backend: VirtualBackend) -> bool:
        values = tied().state_dict()
        with torch.device("meta"):
            model = Tied()
        engine = shard(model, ["embedding", "inner", "head"], OPTIONS, backend=backend, initialize=lambda path, shape: values[path])
        found = {path: torch.equal(weight, values[path]) for path, weight in full_weights(engine)}
        engine.close()
        return len(found) == 5 and all(found.values())

    assert all(run_world((1, 3), program))


@pytest.mark.virtual
def test_codecs_come_from_the_factory_of_the_options() -> None:
    asked = []

    def factory(code: Code, dtype: torch.dtype, block_numel: int) -> Codec:
        asked.append((code, dtype, block_numel))
        return make_codec(code, dtype, block_numel)

    def program(backend: VirtualBackend) -> bool:
        engine = shard(tied(), ["embedding", "inner", "head"], replace(OPTIONS, policy=ZEROPP, make_codec=factory), backend=backend)
        return isinstance(engine.units[0]._codecs.inter, BlockCodec)

    assert all(run_world((2, 1), program))
    assert set(asked) == {(Code(8), torch.float32, 32), (Code(4), torch.float32, 32)}


def test_a_codec_that_does_not_inherit_from_codec_is_refused() -> None:
    with pytest.raises(UserError, match="make_codec made a object; let its class inherit from megatron_zpp.comm.codec.Codec"):
        shard(tied(), ["embedding", "inner", "head"], replace(OPTIONS, make_codec=lambda *_: object()))


def test_the_loss_scaler_of_an_engine_is_not_replaced() -> None:
    engine = shard(tied(), ["embedding", "inner", "head"], OPTIONS)
    with pytest.raises(AttributeError):
        engine.loss_scaler = DynamicLossScaler(2.0)  # type: ignore[misc]
    engine.close()


class SmearingCodec(CastCodec):
    """Its last hop leaves an error in every value of the blocks, and so in padding."""

    mixes_neighbours = True

    def decode_mean_into(self, payloads: Tensor, mean: Regions, *, accumulate: bool) -> None:
        super().decode_mean_into(payloads, mean, accumulate=accumulate)
        mean.blocks.add_(1.0)


@pytest.mark.virtual
def test_padding_of_gradients_is_zero_with_a_codec_of_ones_own_that_mixes_neighbours() -> None:
    def program(backend: VirtualBackend) -> list[Tensor]:
        options = replace(OPTIONS, make_codec=lambda code, dtype, block_numel: SmearingCodec(dtype))
        engine = shard(tied(), ["embedding", "inner", "head"], options, backend=backend)
        engine.backward(engine.module(torch.arange(4)).square().mean())
        engine.finish_gradients()
        found = [
            gradient.primary.range(padding.start, padding.stop)
            for gradient in engine.gradients
            for padding in gradient.layout.paddings(engine.links.own_slice, 1)
        ]
        engine.close()
        return found

    paddings = [padding for of_rank in run_world((2, 1), program) for padding in of_rank]
    assert paddings and not any(padding.any() for padding in paddings)


# ---- bad input


def with_meta_buffer() -> nn.Module:
    model = tied()
    model.register_buffer("counts", torch.ones(2, device="meta"))
    return model


def in_a_list() -> nn.Module:
    model = tied()
    model.inner = nn.ModuleList(model.inner)
    return model


def on_two_devices() -> nn.Module:
    model = tied()
    model.inner = model.inner.to("meta")
    return model


def twice() -> nn.Module:
    model = tied()
    model.again = model.inner
    return model


def on_meta() -> nn.Module:
    return tied().to("meta")


def with_sparse_gradients() -> nn.Module:
    model = tied()
    model.embedding.sparse = True
    return model


def with_max_norm() -> nn.Module:
    model = tied()
    model.embedding.max_norm = 1.0
    return model


def without_elements() -> nn.Module:
    model = tied()
    model.inner[0] = nn.Embedding(0, 12)
    return model


def in_fp64() -> nn.Module:
    return tied().double()


ALL = ["embedding", "inner", "head"]
OFFLOADED_APEX = EngineOptions(with_offloaded_optimizer(POLICIES[2]), adam=AdamOptions(backend="apex"))


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("module", "units", "arguments", "words"),
    [
        (tied, "embedding", {}, ["list of paths", "'embedding', 'inner', 'head'"]),
        (tied, [], {}, ["list of paths"]),
        (tied, ["embedding", "body"], {}, ["no submodule 'body'", "'inner'"]),
        (tied, [*ALL, "inner"], {}, ["'inner' is named twice"]),
        (tied, [*ALL, "inner.1"], {}, ["'inner.1' is inside unit 'inner'"]),
        (tied, ["", "inner"], {}, ["'inner' is inside unit ''"]),
        (tied, ["embedding", "inner.0", "inner.1", "inner.2", "head"], {}, ["unit 'inner.2' has no parameters"]),
        (twice, [*ALL, "again"], {}, ["parameter again.0.weight is in the units 'inner' and 'again'", "more than once"]),
        (with_sparse_gradients, ALL, {}, ["module embedding makes sparse gradients", "sparse=False"]),
        (with_max_norm, ALL, {}, ["module embedding has a max_norm", "leave max_norm out"]),
        (without_elements, ["embedding", "inner.0", "inner.1", "head"], {}, ["the parameters of unit 'inner.0' have no elements"]),
        (in_fp64, ALL, {}, ["parameter embedding.weight is torch.float64", "torch.bfloat16"]),
        (on_two_devices, ALL, {}, ["embedding.weight on cpu", "inner.0.weight on meta"]),
        (on_meta, ALL, {}, ["on the meta device", "pass `initialize`"]),
        (tied, ALL, {"initialize": lambda path, shape: torch.zeros(shape)}, ["leave it out"]),
        (tied, ALL, {"options": EngineOptions(dtype=torch.float64)}, ["dtype torch.float64 is not supported"]),
        (tied, ALL, {"options": EngineOptions(block_numel=100)}, ["block_numel is 100", "multiple of 32"]),
        (tied, ALL, {"options": EngineOptions(prefetch=Prefetch(-1, 0))}, ["0 or more"]),
        (tied, ALL, {"options": EngineOptions(clip_grad=float("nan"))}, ["clip_grad is nan"]),
        (tied, ALL, {"uses": [Use("body", ("inner",), True)]}, ["the module 'body'"]),
        (tied, ALL, {"uses": [Use("inner", ("head",), True)]}, ["reads ['head']", "['embedding', 'inner']"]),
        (tied, ALL, {"uses": [Use("inner", ("inner",), True)]}, ["no use reads the units ['embedding']"]),
        (tied, ALL, {"grid": Grid.of_nodes(1, 3)}, ["has 3 ranks", "the world has 2"]),
        (tied, ALL, {"grid": Grid.of_nodes(2, 1)}, ["that of the backend is Grid(world_size=2, ranks_per_node=2", "leave `grid` out"]),
        (tied, ALL, {"grid": Grid.of_nodes(1, 2, tensor_ranks=2)}, ["has 2 tensor ranks", "divides no layer", "give one with 1"]),
        (tied, ALL, {"grid": Grid.of_nodes(1, 2, context_ranks=2)}, ["has 2 context ranks", "divides no sample", "give one with 1"]),
        (tied, [1, 2], {}, ["list of paths"]),
        (tied, set(ALL), {}, ["list of paths"]),  # without an order that is the same on every rank
        (in_a_list, ALL, {}, ["unit 'inner' is a ModuleList, which is never called"]),
        (with_meta_buffer, ALL, {}, ["buffer counts is on the meta device"]),
        (tied, ALL, {"options": EngineOptions(policy=3)}, ["policy is 3", "ZEROPP"]),
        (tied, ALL, {"options": EngineOptions(adam=AdamOptions(backend="foo"))}, ["the backend of adam is 'foo'"]),
        (tied, ALL, {"options": EngineOptions(adam=AdamOptions(beta2=1.0))}, ["beta2 of adam is 1.0", "less than 1"]),
        (tied, ALL, {"options": EngineOptions(adam=AdamOptions(eps=0.0))}, ["eps of adam is 0.0", "positive"]),
        (tied, ALL, {"options": EngineOptions(adam=AdamOptions(weight_decay=float("nan")))}, ["weight_decay of adam is nan", "0 or more"]),
        (tied, ALL, {"loss_scaler": ConstantLossScaler(float("inf"))}, ["the scale of loss_scaler is inf", "positive"]),
        (tied, ALL, {"options": OFFLOADED_APEX}, ["the backend of adam is 'apex'", "host", "choose torch"]),
        (tied, ALL, {"options": EngineOptions(full_precision_iterations=-1)}, ["full_precision_iterations is -1"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_bad_input_of_one_rank_is_refused_on_every_rank(
    module: Callable[[], nn.Module], units: Any, arguments: dict[str, Any], words: list[str]
) -> None:
    def program(backend: Backend) -> str:
        with pytest.raises(UserError, match=re.escape(words[0])) as refused:
            if backend.rank == 0:
                shard(tied(), ALL, backend=backend)
            else:
                shard(module(), units, **arguments, backend=backend)
        return str(refused.value)

    good, bad = run_world((1, 2), program)
    assert all(word in bad for word in words), bad
    assert good == f"{bad} (on rank 1)"


@pytest.mark.virtual
def test_bad_first_values_of_one_rank_are_refused_on_every_rank() -> None:
    def program(backend: Backend) -> str:
        extra = backend.rank  # rank 1 gives one row too many
        with pytest.raises(UserError, match="initialize gave") as refused:
            shard(on_meta(), ALL, backend=backend, initialize=lambda path, shape: torch.zeros(shape[0] + extra, *shape[1:]))
        return str(refused.value)

    good, bad = run_world((1, 2), program)
    assert bad == "initialize gave [14, 12] values for parameter embedding.weight, which has [13, 12]"
    assert good == f"{bad} (on rank 1)"


@pytest.mark.virtual
def test_a_bug_in_a_programs_own_first_values_keeps_its_error_and_ends_the_other_ranks() -> None:
    def program(backend: Backend) -> str:
        values: dict[int, float] = {0: 1.0}
        error: type[Exception] = UserError if backend.rank == 0 else KeyError
        with pytest.raises(error) as refused:
            shard(on_meta(), ALL, backend=backend, initialize=lambda path, shape: torch.full(shape, values[backend.rank]))
        return str(refused.value)

    assert run_world((1, 2), program) == ["KeyError(1) (on rank 1)", "1"]


@pytest.mark.virtual
@pytest.mark.parametrize("differ", ["first values of parameters", "arguments of shard()"])
def test_ranks_that_differ_are_refused_alike(differ: str) -> None:
    def program(backend: VirtualBackend) -> str:
        model, is_odd = tied(), backend.rank == 2
        if is_odd and differ.startswith("first"):
            with torch.no_grad():
                model.inner[1].bias[3] += 1e-6
        options = replace(OPTIONS, block_numel=64) if is_odd and differ.startswith("arguments") else OPTIONS
        with pytest.raises(UserError, match="differ from those of rank 0") as refused:
            shard(model, ALL, options, backend=backend)
        return str(refused.value)

    (error,) = set(run_world((1, 3), program))
    assert all(word in error for word in (differ, "ranks [2]", "rank 0"))


def test_nothing_keeps_the_parameters_that_the_module_had() -> None:
    model = tied()
    old = [weakref.ref(parameter) for parameter in model.parameters()]
    engine = shard(model, ALL)
    gc.collect()
    assert [ref() for ref in old] == [None] * len(old)
    assert all(parameter.isnan().all() for parameter in model.parameters())  # at rest
    engine.close()


def test_ranks_whose_launcher_does_not_name_nodes_ask_for_a_grid(ranks: RankPool) -> None:
    found = ranks.run(1, 2, error_without_local_world_size)
    assert found[0] == found[1]
    assert "LOCAL_WORLD_SIZE is not set for this world" in found[0]
    assert "grid=Grid.of_nodes" in found[0]


def test_a_program_that_ends_without_closing_its_engine_is_told_so_on_every_rank(ranks: RankPool) -> None:
    for rank, (text, is_all) in enumerate(ranks.run(1, 2, partial(said_at_the_end, is_closed=False))):
        assert text.startswith(f"rank {rank}: the program ends before engine.close()") and is_all
    assert ranks.run(1, 2, partial(said_at_the_end, is_closed=True)) == [("", True)] * 2


def test_a_module_that_was_refused_leaves_no_reminder_to_close_its_engine(ranks: RankPool) -> None:
    assert ranks.run(1, 2, reminders_of_a_refused_module) == [0, 0]


def test_kernels_that_are_built_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[bool] = []
    monkeypatch.setattr(extension, "load", lambda: loads.append(True))
    shard(nn.Sequential(nn.Linear(4, 4)), ["0"]).close()
    assert loads == [True]


@pytest.mark.parametrize(
    ("policy", "device", "has_kernels", "asks_for_reference", "is_refused"),
    [
        (ZEROPP, "cuda", False, False, True),
        (with_quantized_gradients(POLICIES[2]), "cuda", False, False, True),
        (ZEROPP, "cuda", True, False, False),
        (ZEROPP, "cuda", False, True, False),
        (ZEROPP, "cpu", False, False, False),
        (POLICIES[3], "cuda", False, False, False),
    ],
    ids=str,
)
def test_a_gpu_without_kernels_is_refused_with_the_remedy_if_the_policy_quantizes(
    policy: Policy, device: str, has_kernels: bool, asks_for_reference: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "has_kernels_for", lambda device_type: has_kernels)
    monkeypatch.setenv(extension.REFERENCE_VARIABLE, str(int(asks_for_reference)))
    remedy = "This builds the kernels: .*, run where this rank runs. Or set MEGATRON_ZPP_REFERENCE_OPS=1 on every rank"
    with pytest.raises(UserError, match=remedy) if is_refused else nullcontext():
        _load_kernels(policy, torch.device(device))


def test_a_process_alone_is_a_world_of_one_on_the_device_of_the_module() -> None:
    engine = shard(tied(), ALL, EngineOptions(POLICIES[3]))
    assert (engine.rank, engine.world_size, engine.device) == (0, 1, torch.device("cpu"))


def test_the_default_device_of_torch_moves_nothing_that_belongs_on_the_host() -> None:
    """A program may set it to its GPU. Here it is one that has no values."""
    model, inputs = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    with torch.device("meta"):
        engine = shard(model, ["0"], EngineOptions(with_offloaded_optimizer(POLICIES[2])))
        engine.backward(model(inputs).square().mean())
        result = engine.step(LEARNING_RATE)
        weights = dict(full_weights(engine))
    assert result.grad_norm > 0
    assert {weight.device.type for weight in weights.values()} == {"cpu"}


def test_a_module_is_sharded_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    shard(module, ["0"]).close()
    with pytest.raises(UserError, match="the module is sharded already"):
        shard(module, ["0"])


@pytest.mark.virtual
def test_a_virtual_world_serves_one_engine() -> None:
    def program(backend: VirtualBackend) -> None:
        shard(tied(), ALL, backend=backend)
        with pytest.raises(UserError, match="the backend serves an engine already"):
            shard(tied(), ALL, backend=backend)

    run_world((1, 2), program)


def test_a_parameter_of_two_sharded_modules_is_refused() -> None:
    module, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    other[0].weight = module[0].weight
    shard(module, ["0"])
    with pytest.raises(UserError, match=r"parameter 0\.weight is shared with a module that is sharded already"):
        shard(other, ["0"])


def differing(rank: int, what: str) -> dict[str, Any]:
    if what == "loss_scaler":
        return {"loss_scaler": DynamicLossScaler(2.0**16, 1.0, 1000, 2)} if rank else {}
    changed = {"clip_grad": 2.0, "adam": AdamOptions(beta1=0.8), "full_precision_iterations": 1, "counts_zeros": True, "noise_seed": 1}
    return {"options": EngineOptions(**{what: changed[what]})} if rank else {}


@pytest.mark.virtual
@pytest.mark.parametrize("what", ["loss_scaler", "clip_grad", "adam", "full_precision_iterations", "counts_zeros", "noise_seed"])
def test_options_that_differ_between_ranks_are_refused_and_the_modules_stay_as_they_were(what: str) -> None:
    def program(backend: Backend) -> bool:
        model = tied()
        before = list(model.parameters())
        with pytest.raises(UserError, match="arguments of shard"):
            shard(model, ALL, **differing(backend.rank, what), backend=backend)
        return all(one is other for one, other in zip(before, model.parameters(), strict=True))

    assert run_world((1, 2), program) == [True, True]


def one_layer() -> tuple[nn.Module, ZeroEngine]:
    model = nn.Sequential(nn.Linear(4, 4))
    return model, shard(model, ["0"])


@pytest.mark.parametrize("microbatches", [0, -1, float("nan")])
def test_a_number_of_micro_batches_that_is_none_is_refused(microbatches: Any) -> None:
    model, engine = one_layer()
    with pytest.raises(UserError, match=f"microbatches is {microbatches}; give the number"):
        engine.backward(model(torch.ones(2, 4)).sum(), microbatches=microbatches)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e-3])
@pytest.mark.parametrize("name", ["learning_rate", "weight_decay"])
def test_a_bad_number_for_a_step_is_refused_and_the_step_can_follow(name: str, bad: float) -> None:
    model, engine = one_layer()
    before = dict(full_weights(engine))
    engine.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(UserError, match=f"{name} is {bad}; give a finite number, 0 or more"):
        engine.step(**{"learning_rate": 1e-3, name: bad})
    assert all(torch.equal(weight, before[path]) for path, weight in full_weights(engine))
    assert not engine.step(learning_rate=1e-3).is_skipped


def test_a_micro_batch_after_the_last_one_is_refused() -> None:
    model, engine = one_layer()
    engine.backward(model(torch.ones(2, 4)).sum(), microbatches=2)
    with pytest.raises(RuntimeError, match="the last micro-batch of this step has come already"):
        engine.backward(model(torch.ones(2, 4)).sum(), microbatches=2)


def test_a_step_without_a_last_micro_batch_is_refused() -> None:
    model, engine = one_layer()
    engine.backward(model(torch.ones(2, 4)).sum(), is_last_microbatch=False)
    with pytest.raises(RuntimeError, match="no micro-batch of this step was the last"):
        engine.step(1e-3)


def test_an_engine_whose_backward_failed_is_not_used_again() -> None:
    model, engine = one_layer()
    loss = model(torch.ones(2, 4)).sum()
    loss.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    for call in (lambda: engine.step(1e-3), lambda: engine.backward(model(torch.ones(2, 4)).sum())):
        with pytest.raises(RuntimeError, match=r"an earlier engine.backward\(\) failed"):
            call()


def test_a_closed_engine_lets_nothing_through() -> None:
    model, engine = one_layer()
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="its engine is closed"):
        model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.step(1e-3)
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None  # although the module lives


@pytest.mark.virtual
def test_an_engine_that_is_not_closed_is_freed_with_its_module() -> None:
    models, engines = [tied() for _ in range(2)], []

    def program(backend: Backend) -> None:
        model = models.pop()
        engine = shard(model, ALL, backend=backend)
        engine.backward(tied_loss(model, 0))
        engine.step(LEARNING_RATE)
        engine.links.lanes.drain()
        engines.append(weakref.ref(engine))

    run_world((1, 2), program)
    gc.collect()
    assert [engine() for engine in engines] == [None, None]


def test_the_state_dict_of_a_sharded_module_names_full_weights() -> None:
    model, _ = one_layer()
    with pytest.raises(RuntimeError, match="full_weights"):
        model.state_dict()
