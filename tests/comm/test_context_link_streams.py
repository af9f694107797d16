"""The context link on streams: no two accesses without an order, every wait needed, exchanges beside computation, a host that goes on."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from harness.fake_streams.accesses import RaceError
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.fake_streams.machine import Site
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.waits import Waits
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import CONTEXT_ACROSS
from megatron_zpp.tensor_parallel.head_exchange import HeadExchange

pytestmark = pytest.mark.virtual

GRIDS = {"2 ranks": Grid(2, 2, 2, 1, 2), "2 groups of 2": Grid(4, 2, 1, 2, 2), "4 ranks": Grid(4, 2, 2, 1, 4)}
GROUPS, QUERIES, CHANNELS = 2, 2, 3
CROSSING, PRODUCT = 3.0, 5.0


def link_on(gpu: Gpu) -> ContextLink:
    staging = Staging(torch.device("cpu"), gpu.machine)
    return ContextLink(gpu.backend, Ledger(gpu.backend.grid, gpu.backend.rank), staging, gpu.machine, Waits())


def program(gpu: Gpu) -> tuple[list[float], set[Site]]:
    """Attention's exchanges, forward and backward, then exchanges beside computation. Memory is freed and taken again."""
    link = link_on(gpu)
    exchange = HeadExchange(link, GROUPS, QUERIES, CHANNELS)
    numbers = []
    for step in range(3):
        own = torch.full((2, 2, GROUPS * (QUERIES + 2) * CHANNELS), float(step + link.rank), requires_grad=True)
        qkv = exchange.all_tokens(own * 1.5)
        width = GROUPS * QUERIES * CHANNELS // link.ranks
        weight = torch.full((5, GROUPS * QUERIES * CHANNELS), 0.1, requires_grad=True)
        mixed = exchange.linear((qkv[..., :width] * qkv[..., -width:]).tanh(), weight, None)
        (mixed * mixed).sum().backward()
        assert own.grad is not None and weight.grad is not None
        numbers += [mixed.detach().sum(), own.grad.sum(), weight.grad.sum()]
        parts = mixed.detach().flatten()[: 2 * link.ranks].view(link.ranks, 2)
        first, second = link.start_exchange(parts * 2), link.start_exchange(parts * 3)
        # A blocking exchange while others are under way: the communicator is used from two streams.
        numbers += [link.exchange(parts).sum(), (first.wait() + second.wait()).sum()]
    values = torch.stack(numbers).tolist()
    gpu.machine.synchronize()
    return values, gpu.machine.needed


@cache
def needed_in(name: str) -> set[Site]:
    return set().union(*(needed for _, needed in run_on_gpus(GRIDS[name], program)))


@pytest.mark.parametrize("name", GRIDS)
def test_no_two_accesses_lack_an_order(name: str) -> None:
    assert needed_in(name)


def test_each_line_whose_wait_orders_anything_is_missed_when_it_has_no_effect() -> None:
    sites = needed_in("2 ranks")
    assert sorted(str(site) for site in sites if not is_caught(site)) == []
    assert {"wait_event", "wait_stream", "record_event"} <= {site.call for site in sites if site.file == "operation.py"}


def is_caught(site: Site) -> bool:
    try:
        run_on_gpus(GRIDS["2 ranks"], program, without=site)
    except RaceError:
        return True
    return False


class Products(TorchDispatchMode):
    """Lets every matrix product take PRODUCT."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self._gpu.machine.spend(PRODUCT)
        return func(*args, **(kwargs or {}))


def test_backward_exchanges_the_gradient_of_heads_beside_the_product_for_the_weight() -> None:
    """All kernels but products take no time: forward one exchange and one product, backward two products and one exchange."""

    def time(gpu: Gpu) -> float:
        exchange = HeadExchange(link_on(gpu), GROUPS, QUERIES, CHANNELS)
        heads = torch.ones(1, 4, GROUPS * QUERIES * CHANNELS // 2, requires_grad=True)
        weight = torch.ones(5, GROUPS * QUERIES * CHANNELS, requires_grad=True)
        with Products(gpu):
            exchange.linear(heads, weight, None).sum().backward()
        gpu.machine.synchronize()
        return gpu.machine.compute.free_at

    expected = CROSSING + PRODUCT + PRODUCT + max(PRODUCT, CROSSING)
    assert run_on_gpus(GRIDS["2 ranks"], time, times={CONTEXT_ACROSS: CROSSING}) == [expected] * 2


def times_of(gpu: Gpu, *, is_beside: bool) -> tuple[float, float]:
    """The time of the host, and that of a matrix product and one exchange, beside each other or one after the other."""
    link, values = link_on(gpu), torch.ones(2, 8)
    pending = link.start_exchange(values) if is_beside else None
    gpu.machine.spend(PRODUCT)
    result = link.exchange(values) if pending is None else pending.wait()
    assert result.numel() == values.numel()
    host_time = gpu.machine.host_time
    gpu.machine.synchronize()
    return host_time, gpu.machine.compute.free_at


def test_an_exchange_beside_a_product_takes_the_longer_of_both_otherwise_their_sum_and_the_host_never_waits() -> None:
    run = partial(run_on_gpus, GRIDS["2 ranks"], times={CONTEXT_ACROSS: CROSSING})
    assert run(partial(times_of, is_beside=True)) == [(0.0, max(PRODUCT, CROSSING))] * 2
    assert run(partial(times_of, is_beside=False)) == [(0.0, PRODUCT + CROSSING)] * 2
