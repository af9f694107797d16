"""A rank that adds up values over its tensor link; rank 0 writes what it finds.

python -m benchmarks.gpu.tensor_program FILE
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.files import write_json
from benchmarks.gpu.place import Place
from megatron_zpp.comm.backend import TorchBackend
from megatron_zpp.comm.first_messages import send_first_messages
from megatron_zpp.comm.lanes import make_lanes
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.comm.streams import streams_of
from megatron_zpp.comm.tensor_link import TensorLink
from megatron_zpp.monitor.timers import clock_of
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import make_lane_groups, nccl_backend, world_options
from testbed.session import RankPlace

TENSOR_RANKS = 2
SHAPES = ((2, 8), (6, 40), (64, 1024), (4096, 1024))
ODD_SHAPE = (7, 13)  # for whole sums, which are padded
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTH = {True: 64, False: 8192}  # of the matrices that are multiplied
REPEATS = 10
TIMEOUT = timedelta(seconds=60)


def main(file: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Place.here()
    if place.is_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        place = Place(device, is_tiny=False)
    library = nccl_backend() if place.is_gpu else "gloo"
    dist.init_process_group(library, timeout=TIMEOUT, pg_options=world_options(TIMEOUT, place.device))
    grid = Grid.of_nodes(1, world_size, TENSOR_RANKS)
    streams = streams_of(place.device)
    backend, lanes = TorchBackend(grid, rank, make_lane_groups(grid, rank, TIMEOUT, place.device)), make_lanes(streams)
    if streams is not None:
        send_first_messages(backend, lanes, place.device)
    rank_place = RankPlace(backend, lanes, place.device, streams)
    wrong, compared = compare_sums(rank_place)
    seconds = time_overlap(link_of(rank_place), place)
    if rank == 0:
        write_json(file, {"wrong": wrong, "compared": compared, "seconds": seconds})
    dist.barrier()
    dist.destroy_process_group()


def link_of(place: RankPlace) -> TensorLink:
    """The tensor link of this rank."""
    links = Links(place.backend, place.lanes, Ledger(place.backend.grid, place.backend.rank), place.device, place.streams)
    if links.tensor_link is None:
        raise RuntimeError("there is no tensor link in a world without tensor ranks")
    return links.tensor_link


def compare_sums(place: RankPlace) -> tuple[list[str], int]:
    """The operations with wrong bits on any rank, and how many there were. Every rank must call it."""
    link, data_rank = link_of(place), place.backend.grid.data_rank_of(place.backend.rank)
    names, are_right = list[str](), list[Tensor]()
    for dtype in DTYPES:
        for shape in (*SHAPES, ODD_SHAPE):
            members = [_values(shape, dtype, 100 * data_rank + tensor_rank).to(place.device) for tensor_rank in range(link.ranks)]
            own, total = members[link.rank], _added_in_order(members)
            expected = {"summed": total, "gather": torch.stack(members)}
            if shape[0] % link.ranks == 0:
                expected["sum_scattered"] = total.chunk(link.ranks)[link.rank]
            for name, right in expected.items():
                for found in (getattr(link, name)(own), _beside_a_product(getattr(link, f"start_{name}"), own)):
                    names.append(f"{name} of {list(shape)} {dtype}")
                    are_right.append((found == right).all())
    on_every_rank = place.backend.gather_world(torch.stack(are_right).to(torch.uint8)).flatten(0, 1).amin(dim=0).tolist()
    return [name for name, right in zip(names, on_every_rank, strict=True) if not right], len(names)


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _added_in_order(members: list[Tensor]) -> Tensor:
    total = members[0].float()
    for member in members[1:]:
        total = total + member.float()
    return total.to(members[0].dtype)


def _beside_a_product(start: Callable[[Tensor], Any], own: Tensor) -> Tensor:
    """The result of an operation that is waited for after other work, from a copy of `own` whose memory is given up at once."""
    pending = start(own.clone())
    product = own.float() @ own.float().T
    result: Tensor = pending.wait()
    del product
    return result


def time_overlap(link: TensorLink, place: Place) -> dict[str, float]:
    """Seconds of a matrix product, of a scattered sum, of one after the other, and of both beside each other."""
    width = WIDTH[place.is_tiny]
    dtype = torch.float32 if place.is_tiny else torch.bfloat16
    left, values = (torch.ones(width, width, dtype=dtype, device=place.device) for _ in range(2))

    def beside() -> None:
        pending = link.start_sum_scattered(values)
        torch.mm(left, left)
        pending.wait()

    def one_after_the_other() -> None:
        torch.mm(left, left)
        link.sum_scattered(values)

    calls: dict[str, Callable[[], object]] = {
        "product": lambda: torch.mm(left, left),
        "sum": lambda: link.sum_scattered(values),
        "one after the other": one_after_the_other,
        "beside each other": beside,
    }
    return {name: _median_seconds(call, place) for name, call in calls.items()}


def _median_seconds(call: Callable[[], object], place: Place) -> float:
    clock, seconds = clock_of(place.device), list[float]()
    for _ in range(2 + REPEATS):
        place.synchronize()
        start = clock.mark()
        call()
        seconds.append(clock.seconds(start, clock.mark()))
    return statistics.median(seconds[2:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
