"""Kept inputs of recomputed chunks: the same bits as without, full inputs that are gone, and gathers one chunk ahead."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from harness.fake_streams.accesses import RaceError
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.fake_streams.machine import Machine, Site
from harness.live_bytes import LiveBytes
from harness.lone_link import lone_link
from harness.tensor_parts import VOCAB, config_of
from harness.tensor_ranks import run_tensor_ranks
from torch import Tensor

from megatron_zpp.comm.kept_places import Arena, HostPlaces, NewPlaces, Places
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.tensor_link import TensorLink, padded_part_numel
from megatron_zpp.comm.waits import Waits
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.model.recompute import recomputed
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import TENSOR_ACROSS
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.tensor_parallel.kept_inputs import KeptInputs

pytestmark = pytest.mark.virtual

CPU = torch.device("cpu")
LAYERS, SAMPLES, LENGTH, HIDDEN = 5, 3, 12, 16
NUMEL = SAMPLES * LENGTH * HIDDEN
FULL: dict[str, Any] = {"num_layers": LAYERS, "recompute_granularity": "full", "hidden_dropout": 0.2}
CHUNKS_OF_TWO = FULL | {"recompute_method": "uniform", "recompute_num_layers": 2}
SOME = FULL | {"recompute_method": "block", "recompute_num_layers": 3}


def gpt_of(link: TensorLink | None, **changes: Any) -> GPT:
    tensor = None if link is None else TensorParallel(link)
    return materialize(GPT(config_of("GPT-2", **FULL | changes), VOCAB, 7, torch.float32, tensor))


def forward(model: GPT, first_sample: int = 0) -> Tensor:
    text = torch.randint(VOCAB, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    loss: Tensor = model(text[:, :-1], text[:, 1:], first_sample=first_sample)
    return loss


def bits(model: GPT) -> list[Tensor]:
    """Loss and gradients of two micro-batches, with evaluations before, between and in the middle."""
    found = []
    for number in range(2):
        evaluate(model)
        loss = forward(model, number * SAMPLES)
        evaluate(model)
        loss.sum().backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]
    evaluate(model)
    return found


def evaluate(model: GPT) -> None:
    model.eval()
    with torch.no_grad():
        forward(model)
    model.train()


def arena(link: TensorLink | None, chunks: int = LAYERS) -> Arena:
    numel = NUMEL if link is None else padded_part_numel(NUMEL, link.ranks, 4)
    return Arena(chunks, numel, torch.float32, CPU)


def on_host(link: TensorLink | None) -> HostPlaces:
    numel = NUMEL if link is None else padded_part_numel(NUMEL, link.ranks, 4)
    return HostPlaces(LAYERS, numel, torch.float32, CPU, Machine())


MADE: dict[str, Callable[[TensorLink], KeptInputs]] = {
    "divided": lambda link: KeptInputs(NewPlaces(), link),
    "in an arena": lambda link: KeptInputs(arena(None), None),
    "divided in an arena": lambda link: KeptInputs(arena(link), link),
    "on the host": lambda link: KeptInputs(on_host(None), None),
    "divided on the host": lambda link: KeptInputs(on_host(link), link),
}


@pytest.mark.parametrize(
    ("ranks", "changes", "names"),
    [(2, FULL, MADE), (2, CHUNKS_OF_TWO, ["divided", "on the host"]), (4, SOME, ["divided in an arena", "divided on the host"])],
    ids=["2", "2, chunks of two", "4, some blocks"],
)
def test_kept_inputs_change_no_bit_of_loss_and_gradients_whatever_is_evaluated_between(
    ranks: int, changes: dict[str, Any], names: list[str]
) -> None:
    def program(link: TensorLink) -> None:
        plain = bits(gpt_of(link, **changes))
        for name in names:
            model = gpt_of(link, **changes)
            model.keep_inputs(MADE[name](link))
            found = bits(model)
            assert len(found) == len(plain) and all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))

    run_tensor_ranks(ranks, program)


def test_one_rank_alone_has_the_same_bits_with_an_arena() -> None:
    plain, model = bits(gpt_of(None)), gpt_of(None)
    model.keep_inputs(KeptInputs(arena(None), None))
    found = bits(model)
    assert len(found) == len(plain) and all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def alive_at_each_block(model: GPT) -> list[int]:
    """How many of the inputs of earlier blocks exist when a block begins in forward."""
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []

    def note(_: Any, arguments: tuple[Tensor, ...]) -> None:
        alive.append(sum(reference() is not None for reference in inputs))
        inputs.append(weakref.ref(arguments[0].untyped_storage()))

    hooks = [block.register_forward_pre_hook(note) for block in model.blocks]
    loss = forward(model)
    for hook in hooks:
        hook.remove()
    loss.sum().backward()
    return alive


@pytest.mark.parametrize("name", MADE)
def test_a_full_input_is_gone_when_the_next_chunk_begins(name: str) -> None:
    def program(link: TensorLink) -> tuple[list[int], list[int]]:
        plain, model = gpt_of(link), gpt_of(link)
        model.keep_inputs(MADE[name](link))
        return alive_at_each_block(plain), alive_at_each_block(model)

    assert run_tensor_ranks(2, program) == [([0, 1, 2, 3, 4], [0, 0, 0, 0, 0])] * 2


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MADE)
def test_between_forward_and_backward_there_are_the_bytes_of_the_formula(name: str, ranks: int) -> None:
    """Chunks x X / T, new or in the arena; nothing else differs. On the host, the last input may still be on its way there."""

    def kept(keeps: bool) -> int:
        link = lone_link(ranks)
        model = gpt_of(link)
        if keeps:
            model.keep_inputs(MADE[name](link))
        with LiveBytes() as live:
            loss = forward(model)
            now = live.now
        loss.sum().backward()
        return now

    whole = NUMEL * 4
    part = whole // ranks if "divided" in name else whole
    new = {"divided": LAYERS * part, "on the host": part, "divided on the host": part}.get(name, 0)
    assert kept(False) - kept(True) == LAYERS * whole - new


class CountedPlaces(HostPlaces):
    """Counts what has come from the host and is on the device at the same time, and the elements of each."""

    def __init__(self, numel: int) -> None:
        super().__init__(LAYERS, numel, torch.float32, CPU, Machine())
        self.most, self.numels = 0, set[int]()
        self._copies: list[weakref.ref[torch.UntypedStorage]] = []

    def copied_up(self, *args: Any) -> Any:
        found = super().copied_up(*args)
        self._copies.append(weakref.ref(found[0].untyped_storage()))
        self.numels.add(found[0].numel())
        self.most = max(self.most, sum(copy() is not None for copy in self._copies))
        return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_of_what_is_kept_on_the_host_two_chunks_are_on_the_device_at_the_same_time(ranks: int) -> None:
    link = lone_link(ranks) if ranks > 1 else None
    places = CountedPlaces(NUMEL // ranks)
    model = gpt_of(link)
    model.keep_inputs(KeptInputs(places, link))
    for step in range(2):
        forward(model, step).sum().backward()
        evaluate(model)
    assert (places.most, places.numels) == (2, {NUMEL // ranks})


def bytes_after_steps(steps: int) -> set[int]:
    """The bytes that exist after each step of training and evaluation, without those of the first."""
    link = lone_link(2)
    model = gpt_of(link)
    model.keep_inputs(KeptInputs(arena(link), link))
    seen = []
    with LiveBytes() as live:
        for step in range(steps):
            forward(model, step).sum().backward()
            evaluate(model)
            model.zero_grad(set_to_none=True)
            seen.append(live.now)
    return set(seen[1:])


def test_memory_does_not_grow_over_training_and_evaluation() -> None:
    assert len(bytes_after_steps(4)) == 1


@pytest.mark.long
def test_memory_does_not_grow_over_200_steps_of_training_and_evaluation() -> None:
    assert len(bytes_after_steps(200)) == 1


def test_a_backward_after_a_later_forward_is_an_error_and_never_wrong_gradients() -> None:
    model = gpt_of(None)
    model.keep_inputs(KeptInputs(arena(None), None))
    older = forward(model)
    forward(model, SAMPLES)
    with pytest.raises(RuntimeError, match="overwritten by a later forward"):
        older.sum().backward()


def test_inputs_of_new_memory_may_wait_for_backward_side_by_side() -> None:
    def program(link: TensorLink) -> bool:
        model = gpt_of(link)
        first = forward(model)
        first.sum().backward()
        alone = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        model.keep_inputs(KeptInputs(NewPlaces(), link))
        first, second = forward(model), forward(model, SAMPLES)
        first.sum().backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        second.sum().backward()
        return all(torch.equal(one, other) for one, other in zip(alone, found, strict=True))

    assert run_tensor_ranks(2, program) == [True, True]


def test_a_chunk_has_one_input() -> None:
    inputs = KeptInputs(NewPlaces(), None).of_forward()
    one, other = torch.ones(2, requires_grad=True) * 1, torch.ones(2, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="one input of chunk 1 is to be kept, and not one of chunk 0"):
        recomputed(lambda left, right: (left * right).relu(), one, other, hooks=inputs.hooks(0))


# ---- on streams

GRIDS = {"2 ranks": Grid(2, 2, 1, 2), "3 ranks": Grid(3, 3, 1, 3)}
CROSSING, PRODUCT, CHAIN = 3.0, 5.0, 4
WIDTH = 10


def link_on(gpu: Gpu) -> TensorLink:
    return TensorLink(gpu.backend, Ledger(gpu.backend.grid, gpu.backend.rank), Staging(CPU, gpu.machine), gpu.machine, Waits())


def chain(gpu: Gpu, place: str) -> tuple[list[float], set[Site]]:
    """Steps of a chain of recomputed chunks, each with a sum over the link."""
    link = link_on(gpu)
    divides, on_host = "divided" in place, "host" in place
    part = padded_part_numel(2 * WIDTH, link.ranks, 4) if divides else 2 * WIDTH
    places: Places = HostPlaces(CHAIN, part, torch.float32, CPU, gpu.machine) if on_host else Arena(CHAIN, part, torch.float32, CPU)
    kept = KeptInputs(NewPlaces() if place == "divided" else places, link if divides else None)
    found = []
    for step in range(3):
        start = torch.full((2, WIDTH), 1.0 + step, requires_grad=True)
        hidden, inputs = start * 1.5, kept.of_forward()
        for chunk in range(CHAIN):
            hidden = recomputed(partial(_of_chunk, link, chunk), hidden, hooks=inputs.hooks(chunk))
        hidden.sum().backward()
        assert start.grad is not None
        found += [hidden.detach().sum(), start.grad.sum()]
    values: list[float] = torch.stack(found).tolist()
    gpu.machine.synchronize()
    return values, gpu.machine.needed


def _of_chunk(link: TensorLink, chunk: int, hidden: Tensor) -> Tensor:
    return (hidden * link.summed(hidden.detach() + chunk)).tanh() * hidden


PLACES = ["divided", "divided in an arena", "divided on the host", "on the host"]


@cache
def needed_in(place: str, grid: str = "2 ranks") -> tuple[tuple[float, ...], frozenset[Site]]:
    outcomes = run_on_gpus(GRIDS[grid], partial(chain, place=place))
    return tuple(outcomes[0][0]), frozenset().union(*(needed for _, needed in outcomes))


@pytest.mark.parametrize("grid", GRIDS)
def test_no_two_accesses_lack_an_order_and_no_place_changes_a_bit(grid: str) -> None:
    assert len({needed_in(place, grid)[0] for place in PLACES}) == 1


@pytest.mark.parametrize("place", ["divided", "divided on the host"])
def test_each_line_whose_wait_orders_anything_is_missed_when_it_has_no_effect(place: str) -> None:
    survivors = [str(site) for site in needed_in(place)[1] if not is_caught(place, site)]
    assert sorted(survivors) == []


def is_caught(place: str, site: Site) -> bool:
    try:
        run_on_gpus(GRIDS["2 ranks"], partial(chain, place=place), without=site)
    except RaceError:
        return True
    return False


def test_gathers_run_beside_the_products_of_the_chunk_before() -> None:
    """Backward waits for the first gather alone."""

    class Timed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, gpu: Gpu) -> Tensor:
            ctx.gpu = gpu
            ctx.save_for_backward(hidden)
            gpu.machine.spend(PRODUCT)
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            (hidden,) = ctx.saved_tensors
            ctx.gpu.machine.spend(PRODUCT)
            return gradients[0] * hidden, None

    def time(gpu: Gpu) -> float:
        kept = KeptInputs(NewPlaces(), link_on(gpu)).of_forward()
        hidden = torch.ones(2, WIDTH, requires_grad=True) * 1.0
        for chunk in range(CHAIN):
            hidden = recomputed(partial(_timed, Timed, gpu), hidden, hooks=kept.hooks(chunk))
        hidden.sum().backward()
        gpu.machine.synchronize()
        return gpu.machine.compute.free_at

    # Forward, recomputation and backward of each chunk take PRODUCT.
    assert run_on_gpus(GRIDS["2 ranks"], time, times={TENSOR_ACROSS: CROSSING}) == [3 * CHAIN * PRODUCT + CROSSING] * 2


def _timed(function: Any, gpu: Gpu, hidden: Tensor) -> Tensor:
    timed: Tensor = function.apply(hidden, gpu)
    return timed
