"""One rank of benchmarks/long_sequences.py: trains on samples that all ranks divide, and writes its losses and its peak of memory.

Its words are FILE STEPS LIMIT FLAGS... LIMIT: bytes beyond those that it has before its model is built; 0 for none.
"""

from __future__ import annotations

import os
import resource
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.files import write_json
from megatron_zpp.comm.backend import TorchBackend
from megatron_zpp.comm.lanes import make_lanes
from megatron_zpp.monitor.memory import PROCESS_STATUS, max_resident_bytes, resident_bytes
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import make_lane_groups
from testbed.session import RankPlace, Session

CPU = torch.device("cpu")
TIMEOUT = timedelta(minutes=30)
RESET_PEAK = "5"  # proc(5), clear_refs


def main(file: Path, steps: int, limit_bytes: int, flags: list[str]) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    grid = Grid.of_nodes(1, world_size, context_ranks=world_size)
    backend = TorchBackend(grid, rank, make_lane_groups(grid, rank, TIMEOUT, CPU))
    if limit_bytes:
        most = data_bytes() + limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    shape = f"--ranks-per-node {world_size} --context-parallel-size {world_size}"
    session = Session(f"{' '.join(flags)} {shape}", RankPlace(backend, make_lanes(None), CPU))
    losses = [session.step(0)[0] for _ in range(steps - 1)]
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    before = resident_bytes(PROCESS_STATUS)
    losses.append(session.step(0)[0])
    peak = max_resident_bytes(PROCESS_STATUS) - before
    need = session.need
    found = {"losses": losses, "peak_bytes": peak, "planned_bytes": need.in_step}
    write_json(file.with_suffix(f".{rank}.json"), found)
    dist.barrier()
    session.close()


def data_bytes() -> int:
    """What RLIMIT_DATA counts of this process: VmData of its status file."""
    line = next(line for line in PROCESS_STATUS.read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)
