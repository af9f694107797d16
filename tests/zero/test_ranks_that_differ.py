"""Ranks that call units in other orders are told so before an update. Those that leave units out hold up nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.small_engine import Job, ModelShape, Rank
from harness.worlds import run_world
from torch import Tensor, nn

from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.hop_order import HopOrder, first_difference
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import LANES
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES, Policy, with_offloaded_optimizer, with_secondary_weights
from megatron_zpp.zero.schedule import Prefetch
from megatron_zpp.zero.shard import full_weights, shard

pytestmark = pytest.mark.virtual

WIDTH, LAYERS = 16, 4
OPTIONS = EngineOptions(POLICIES[3], block_numel=32, clip_grad=0.0)


class Residual(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(super().forward(hidden))


class Chosen(nn.Sequential):
    """Calls the layers of `order`, those of `without` under no_grad."""

    order: Sequence[int] = ()
    without: Sequence[int] = ()

    def forward(self, hidden: Tensor) -> Tensor:
        for index in self.order:
            with torch.set_grad_enabled(index not in self.without):
                added = self[index](hidden)
            hidden = hidden + added
        return hidden


def chain(layers: int = LAYERS) -> Chosen:
    torch.manual_seed(1)
    model = Chosen(*(Residual(WIDTH, WIDTH) for _ in range(layers)))
    model.order = range(layers)
    return model


def sample(index: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(index))


def sharded(model: nn.Sequential, backend: VirtualBackend, options: EngineOptions = OPTIONS) -> ZeroEngine:
    return shard(model, [str(index) for index in range(len(model))], options, backend=backend)


# ---- orders


@pytest.mark.parametrize("policy", [POLICIES[3], with_secondary_weights(POLICIES[3])], ids=["stage 3", "hpZ"])
def test_an_update_after_ranks_have_used_weights_of_other_units_is_refused_on_every_rank(policy: Policy) -> None:
    """In an evaluation, which gathers as many units of the same size on each rank."""
    orders = ((0, 1, 3, 2), (0, 2, 1, 3))
    models = [chain(), chain()]

    def program(backend: VirtualBackend) -> str:
        model = models[backend.rank]
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        engine = sharded(model, backend, replace(OPTIONS, policy=policy, prefetch=Prefetch(0, 0)))
        hidden = sample(backend.rank)
        with torch.no_grad():
            for index in orders[backend.rank]:
                hidden = model[index](hidden)
        engine.backward(model(hidden).square().mean())
        with pytest.raises(RuntimeError) as refused:
            engine.step(1e-2)
        for name, weight in full_weights(engine):
            assert torch.equal(weight, before[name])
        return str(refused.value)

    first, second = run_world((1, 2), program)
    assert first == second
    assert first.startswith(
        "ranks 0 and 1 made different calls: after 3 messages over the intra link since the last step, rank 0 asked for the weights of "
        "unit 3 and rank 1 for the weights of unit 0. "
    )
    assert "has changed no weight" in first


def test_the_first_hop_that_differs_is_named_with_its_place() -> None:
    orders = [HopOrder(), HopOrder(), HopOrder()]
    for rank, order in enumerate(orders):
        for unit in ("a", "b", "a" if rank == 2 else "c"):
            order.add(LANES[1], unit)
    assert orders[0].checksum == orders[1].checksum != orders[2].checksum
    assert first_difference([order.as_text() for order in orders]) == (
        "ranks 0 and 2 made different calls: after 2 messages over the intra link since the last step, rank 0 asked for the weights of "
        "unit c and rank 2 for the weights of unit a"
    )
    assert "ranks 4 and 6 made different calls" in first_difference([order.as_text() for order in orders], range(4, 7))


@pytest.mark.parametrize("more", [1, 1000])
def test_a_rank_that_asked_for_more_hops_is_named(more: int) -> None:
    orders = [HopOrder(), HopOrder()]
    for rank, order in enumerate(orders):
        for count in range(2000 + rank * more):
            order.add(LANES[2], str(count))
    text = first_difference([order.as_text() for order in orders])
    if more == 1:
        assert "after 2000 messages over the inter link" in text
        assert text.endswith("rank 0 asked for nothing more and rank 1 for the mean gradient of unit 2000")
    else:
        assert text == "ranks 0 and 1 made different calls: 2000 and 3000 messages over the inter link since the last step"


def test_a_backward_through_units_that_were_called_in_another_order_is_refused() -> None:
    orders = ((0, 2, 1, 3), (1, 0, 2, 3))
    models = [chain(), chain()]

    def program(backend: VirtualBackend) -> None:
        engine = sharded(models[backend.rank], backend)
        hidden = sample(backend.rank)
        for index in orders[backend.rank]:
            hidden = models[backend.rank][index](hidden)
        with pytest.raises(RuntimeError, match=rf"{(2, 1)[backend.rank]} is called in another order than that of `units`"):
            engine.backward(hidden.square().mean())

    run_world((1, 2), program)


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "evaluation"])
def test_a_forward_in_another_order_than_that_of_the_units_is_refused(gradients: bool) -> None:
    models = [chain(), chain()]

    def program(backend: VirtualBackend) -> None:
        model = models[backend.rank]
        sharded(model, backend)
        model.order = (0, 2, 1, 3)
        with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match=r"1 is called in another order than that of `units`"):
            model(sample(0))

    run_world((1, 2), program)


# ---- several open forwards

OPEN = {  # by rank and forward, the layers that are left out, and those that are called under no_grad
    "one leaves out the last of the second": [[((), ()), ((), ())], [((), ()), ((7,), ())]],
    "one leaves out the first of the first": [[((), ()), ((), ())], [((0, 1, 2, 3), ()), ((), ())]],
    "other ones on each rank": [[((1, 2), ()), ((6, 7), ())], [((4,), ()), ((0, 3), ())]],
    "one calls each in one of them": [[((), ()), ((), ())], [((4, 5, 6, 7), ()), ((0, 1, 2, 3), ())]],
    "one calls each in one of them, the last first": [[((), ()), ((), ())], [((0, 1, 2, 3), ()), ((4, 5, 6, 7), ())]],
    "one calls some without gradients": [[((), ()), ((), ())], [((), (0, 1)), ((), (5, 6))]],
}


@pytest.mark.parametrize("losses", ["in order", "the last first", "as one"])
@pytest.mark.parametrize("case", OPEN)
def test_gradients_of_several_open_forwards_are_those_of_plain_torch(case: str, losses: str) -> None:
    """With more layers than descents that may be under way."""
    models, plain = [chain(8), chain(8)], chain(8)

    def of_forwards(model: Chosen, rank: int) -> list[Tensor]:
        found = []
        for forward, (left_out, model.without) in enumerate(OPEN[case][rank]):
            model.order = [layer for layer in range(8) if layer not in left_out]
            found.append(model(sample(10 * rank + forward)).square().mean())
        if losses == "as one":
            return [(found[0] + found[1]) / 2]
        return found if losses == "in order" else found[::-1]

    def program(backend: VirtualBackend) -> float:
        engine = sharded(models[backend.rank], backend, replace(OPTIONS, prefetch=Prefetch(0, 0)))
        parts = of_forwards(models[backend.rank], backend.rank)
        for index, loss in enumerate(parts):
            engine.backward(loss, microbatches=len(parts), is_last_microbatch=index == len(parts) - 1)
        return engine.step(1e-2).grad_norm

    first, second = run_world((2, 1), program, 5.0)
    norm = norm_of(torch.stack([torch.stack(of_forwards(plain, rank)).mean() for rank in range(2)]).mean(), plain)
    assert first == second == pytest.approx(norm, rel=2e-5)


class TwoTimes(nn.Module):
    """Calls a chain twice in one forward, at first with or without gradients."""

    def __init__(self, gradients: bool) -> None:
        super().__init__()
        self.chain = chain()
        self._gradients = gradients

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.set_grad_enabled(self._gradients):
            first = self.chain(hidden)
        second: Tensor = self.chain(hidden + 2 * first)
        return second + first


class Stopping(Chosen):
    """Raises KeyError before a layer."""

    stops_at: int | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        for index in self.order:
            if index == self.stops_at:
                raise KeyError(index)
            hidden = self[index](hidden)
        return hidden


def norm_of(loss: Tensor, model: nn.Module) -> float:
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]).norm().item()


@pytest.mark.parametrize("gradients", [True, False])
def test_a_forward_may_call_all_units_twice(gradients: bool) -> None:
    """As for two inputs of an encoder, or for an input that the model has made itself."""
    models, plain = [TwoTimes(gradients), TwoTimes(gradients)], TwoTimes(gradients)

    def program(backend: VirtualBackend) -> float:
        model = models[backend.rank]
        engine = shard(model, [f"chain.{index}" for index in range(LAYERS)], OPTIONS, backend=backend)
        engine.backward(model(sample(backend.rank)).square().mean())
        return engine.step(1e-2).grad_norm

    loss = torch.stack([plain(sample(rank)).square().mean() for rank in range(2)]).mean()
    assert run_world((2, 1), program, 5.0) == [pytest.approx(norm_of(loss, plain), rel=2e-5)] * 2


@pytest.mark.parametrize("by_unit", [True, False], ids=["unit by unit", "as a module"])
@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluation", "training"])
@pytest.mark.parametrize("stops_at", [0, 2])
def test_after_a_forward_that_raised_the_next_one_is_right(stops_at: int, evaluates: bool, by_unit: bool) -> None:
    def make() -> Stopping:
        model = Stopping(*chain())
        model.order = range(LAYERS)
        return model

    models, plain = [make(), make()], make()

    def program(backend: VirtualBackend) -> float:
        model = models[backend.rank]
        engine = sharded(model, backend)
        model.stops_at = stops_at
        with torch.set_grad_enabled(not evaluates), pytest.raises(KeyError):
            model(sample(5))
        model.stops_at = None
        called = nn.Sequential.forward if by_unit else Stopping.__call__
        engine.backward(called(model, sample(backend.rank)).square().mean())
        return engine.step(1e-2).grad_norm

    loss = torch.stack([plain(sample(rank)).square().mean() for rank in range(2)]).mean()
    assert run_world((2, 1), program, 5.0) == [pytest.approx(norm_of(loss, plain), rel=2e-5)] * 2


REFUSING = {
    "stage 1": (Job(POLICIES[1]), Grid.of_nodes(2, 1)),
    "stage 3, offloaded": (Job(with_offloaded_optimizer(POLICIES[3])), Grid.of_nodes(2, 1)),
    "two tensor ranks": (Job(POLICIES[3]), Grid(4, 2, 1, 2)),
}


def refused(rank: Rank) -> str:
    """The error of the second update, before which the last rank has asked for one more hop. Nothing may change."""
    rank.step(0)
    rank.accumulate(1)
    rank.engine.finish_gradients()
    rank.engine.finish_updates()
    if rank.backend.rank == rank.backend.grid.world_size - 1:
        rank.engine.links.hop_order.add(LANES[2], "more")
    state = [*(unit.main_weight for unit in rank.engine.units), *rank.engine.optimizer.live_tensors()]
    before = [tensor.clone() for tensor in state]
    with pytest.raises(RuntimeError) as error:
        rank.engine.update(1e-2)
    assert all(torch.equal(*values) for values in zip(state, before, strict=True))
    assert rank.engine.optimizer.steps == 1
    return str(error.value)


@pytest.mark.parametrize("case", REFUSING)
def test_every_rank_refuses_the_update_and_keeps_weights_and_moments(case: str) -> None:
    job, grid = REFUSING[case]
    found = run_world(grid, lambda backend: refused(Rank(job, backend)))
    assert len(set(found)) == 1 and "of unit more" in found[0]


def test_an_update_ahead_of_the_host_is_refused_before_it_changes_a_weight() -> None:
    def program(gpu: Gpu) -> str:
        return refused(Rank(Job(POLICIES[3], shape=ModelShape(is_tied=False)), gpu.backend, lanes=gpu.lanes, streams=gpu.machine))

    assert len(set(run_on_gpus((2, 1), program))) == 1
