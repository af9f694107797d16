"""The tensor link on streams: no two accesses without an order, every wait needed, and sums that hide behind matrix products."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from harness.fake_streams.accesses import RaceError
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.fake_streams.machine import Site
from harness.fake_streams.sources import ordering_lines
from torch import Tensor

from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.staging import Staging
from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.comm.waits import Waits
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.topology import TENSOR_ACROSS

pytestmark = pytest.mark.virtual

GRIDS = {"2 ranks": Grid(2, 2, 1, 2), "2 groups of 2": Grid(4, 4, 2, 2), "3 ranks": Grid(3, 3, 1, 3)}
WIDTH = 12
CROSSING, PRODUCT = 3.0, 5.0


def link_on(gpu: Gpu) -> TensorLink:
    staging = Staging(torch.device("cpu"), gpu.machine)
    return TensorLink(gpu.backend, Ledger(gpu.backend.grid, gpu.backend.rank), staging, gpu.machine, Waits())


def program(gpu: Gpu) -> tuple[list[float], set[Site]]:
    """Forward and backward of two linear layers, as with sequence parallelism, then as without it. Memory is freed and taken again."""
    link = link_on(gpu)
    weight = torch.full((WIDTH, WIDTH), 0.1 * (link.rank + 1))
    numbers = []
    for step in range(3):
        own = torch.full((2, WIDTH), float(step + 1))
        own = own + link.sum_scattered(link.gather(own).view(-1, WIDTH) @ weight)
        gathering = link.start_gather(own)
        gradient = own.repeat(link.ranks, 1) @ weight
        whole = gathering.wait().view(-1, WIDTH)
        summing = link.start_sum_scattered(gradient)
        of_weight = whole.T @ own.repeat(link.ranks, 1)
        numbers += [of_weight.sum(), summing.wait().sum()]
        del gathering, whole, gradient, summing
        summing = link.start_summed(own @ weight)
        of_weight = of_weight + own.T @ own
        total = summing.wait() + link.summed(own)
        # A blocking operation while another is under way: the communicator is used from two streams.
        first, second = link.start_summed(total @ weight), link.start_gather(own)
        total = link.summed(own @ weight) + link.gather(own)[0]
        numbers += [of_weight.sum(), total.sum(), first.wait().sum() + second.wait().sum()]
        # The same while the later one of two is under way.
        first, second = link.start_gather(total), link.start_gather(own)
        numbers += [first.wait().sum(), link.gather(own).sum(), second.wait().sum()]
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
    survivors = [str(site) for site in sites if not is_caught(site)]
    assert sorted(survivors) == []
    assert ordering_lines()["operation.py"] <= sites


def is_caught(site: Site) -> bool:
    try:
        run_on_gpus(GRIDS["2 ranks"], program, without=site)
    except RaceError:
        return True
    return False


def time_of(gpu: Gpu, operation: str, *, is_beside: bool) -> float:
    """The time of a matrix product and one operation, beside each other or one after the other."""
    link, values = link_on(gpu), torch.ones(2 * WIDTH, WIDTH)
    if is_beside:
        pending = getattr(link, f"start_{operation}")(values)
        gpu.machine.spend(PRODUCT)
        result: Tensor = pending.wait()
    else:
        gpu.machine.spend(PRODUCT)
        result = getattr(link, operation)(values)
    assert result.numel() > 0
    gpu.machine.synchronize()
    return gpu.machine.compute.free_at


@pytest.mark.parametrize(("operation", "crossings"), [("gather", 1), ("sum_scattered", 1), ("summed", 2)])
def test_an_operation_beside_a_matrix_product_takes_the_longer_of_both_and_otherwise_their_sum(operation: str, crossings: int) -> None:
    crossing = CROSSING * crossings
    run = partial(run_on_gpus, GRIDS["2 ranks"], times={TENSOR_ACROSS: CROSSING})
    assert run(partial(time_of, operation=operation, is_beside=True)) == [max(PRODUCT, crossing)] * 2
    assert run(partial(time_of, operation=operation, is_beside=False)) == [PRODUCT + crossing] * 2


def test_the_host_goes_on_while_an_operation_is_under_way() -> None:
    def host_time(gpu: Gpu) -> float:
        link = link_on(gpu)
        link.summed(torch.ones(WIDTH))
        link.start_gather(torch.ones(WIDTH)).wait()
        so_far = gpu.machine.host_time
        gpu.machine.synchronize()
        return so_far

    assert run_on_gpus(GRIDS["2 ranks"], host_time, times={TENSOR_ACROSS: CROSSING}) == [0.0, 0.0]


@pytest.mark.parametrize("operation", ["sum_scattered", "summed"])
def test_sums_at_once_and_sums_beside_computation_have_one_buffer_each(operation: str) -> None:
    values = torch.ones(2 * WIDTH, WIDTH)

    def buffers(gpu: Gpu) -> int:
        staging = Staging(torch.device("cpu"), gpu.machine)
        link = TensorLink(gpu.backend, Ledger(gpu.backend.grid, gpu.backend.rank), staging, gpu.machine, Waits())
        for _ in range(3):
            getattr(link, operation)(values)
            getattr(link, f"start_{operation}")(values).wait()
        gpu.machine.synchronize()
        return staging.allocated_bytes // values.nbytes

    assert run_on_gpus(GRIDS["2 ranks"], buffers) == [2, 2]
