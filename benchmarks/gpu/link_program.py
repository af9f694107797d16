"""A rank that measures the collectives of its lanes, and a training step with the stalls of computation; rank 0 writes what it finds.

    python -m benchmarks.gpu.link_program FILE FLAGS...

FLAGS are those of the training script.
"""

from __future__ import annotations

import os
import statistics
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.files import write_json
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.place import Place
from benchmarks.gpu.stalls import MeasuredStreams
from benchmarks.gpu.training import report_stalls, time_steps
from megatron_zpp.comm.backend import TorchBackend
from megatron_zpp.comm.lanes import make_lanes
from megatron_zpp.comm.links import INTRA_CLIMB, INTRA_DESCEND
from megatron_zpp.comm.streams import streams_of
from megatron_zpp.monitor.timers import clock_of
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import make_lane_groups, nccl_backend, world_options
from testbed.session import RankPlace, Session

MEGABYTES = {True: (1,), False: (1, 4, 16, 64, 256, 1024)}  # of what a rank holds after a gather, and sends in an exchange
REPEATS = 5
WARMUP_STEPS, STEPS = 2, 4
TIMEOUT = timedelta(seconds=60)


def main(file: Path, flags: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_gpu = torch.cuda.is_available()
    place = (
        Place(torch.device("cuda", int(os.environ["LOCAL_RANK"])), is_tiny=False) if is_gpu else Place(torch.device("cpu"), is_tiny=True)
    )
    if is_gpu:
        torch.cuda.set_device(place.device)
    dist.init_process_group(nccl_backend() if is_gpu else "gloo", timeout=TIMEOUT, pg_options=world_options(TIMEOUT, place.device))
    grid = Grid.of_nodes(1, world_size)
    backend = TorchBackend(grid, rank, make_lane_groups(grid, rank, TIMEOUT, place.device))
    outcome = Outcome()
    outcome.measure(rates=[_rates(backend, place, megabytes) for megabytes in MEGABYTES[place.is_tiny]])
    streams = streams_of(place.device)
    measured = None if streams is None else MeasuredStreams(streams)
    session = Session(flags, RankPlace(backend, make_lanes(measured), place.device, measured))
    steps = time_steps(session, place, WARMUP_STEPS, STEPS)
    outcome.measure(step_seconds=steps.seconds, losses=steps.losses)
    if measured is not None:
        report_stalls(outcome, session, measured, place, STEPS)
    session.close()
    dist.barrier()
    if rank == 0:
        write_json(file, outcome.measured)
    dist.destroy_process_group()


def _rates(backend: TorchBackend, place: Place, megabytes: int) -> dict[str, float]:
    """Gigabytes per second that arrive at this rank in a gather and in an exchange of so many megabytes."""
    world_size = backend.grid.world_size
    nbytes = megabytes * 2**20 // world_size * world_size
    whole, other = (torch.zeros(nbytes, dtype=torch.uint8, device=place.device) for _ in range(2))
    own = whole[: nbytes // world_size].clone()

    def gather() -> None:
        work = backend.all_gather(INTRA_CLIMB, whole, own)
        if work is not None:
            work.wait()

    def exchange() -> None:
        work = backend.exchange(INTRA_DESCEND, whole, other)
        if work is not None:
            work.wait()

    arriving = nbytes * (world_size - 1) / world_size / 1e9
    rates: dict[str, float] = {"megabytes": megabytes}
    for name, call in (("gather", gather), ("exchange", exchange)):
        seconds = []
        for _ in range(2 + REPEATS):
            place.synchronize()
            dist.barrier()
            marks = clock_of(place.device)
            start = marks.mark()
            call()
            seconds.append(marks.seconds(start, marks.mark()))
        rates[name] = arriving / statistics.median(seconds[2:])
    return rates


if __name__ == "__main__":
    main(Path(sys.argv[1]), " ".join(sys.argv[2:]))
    sys.stdout.flush()
    os._exit(0)
