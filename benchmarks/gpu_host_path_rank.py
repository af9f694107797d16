"""One rank of benchmarks/gpu_host_path.py: trains on a fake GPU, and writes its memory and what a step asks of the GPU.

Its words are FILE RANKS_PER_NODE MICROBATCHES FLAGS...
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.fake_gpu.counts import KERNEL, counts, forget_counts
from benchmarks.gpu.files import write_json
from megatron_zpp.comm.backend import TorchBackend
from megatron_zpp.comm.first_messages import send_first_messages
from megatron_zpp.comm.lanes import make_lanes
from megatron_zpp.comm.streams import CudaStreams
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.monitor.memory import read_memory
from megatron_zpp.ops import extension
from megatron_zpp.parallel.groups import make_lane_groups, nccl_backend, world_options
from megatron_zpp.training.sharding import grid_of
from testbed.session import RankPlace, Session

TIMEOUT = timedelta(minutes=10)
STEPS = 3  # before the one that is counted


def main(file: Path, ranks_per_node: int, microbatches: int, flags: list[str]) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    extension.load()
    if not extension.has_kernels_for(device.type):
        raise RuntimeError(extension.report(device.type))
    dist.init_process_group(f"cpu:gloo,cuda:{nccl_backend()}", timeout=TIMEOUT, pg_options=world_options(TIMEOUT, device))
    grid = grid_of(resolve(parse_flags(flags), world_size, ranks_per_node), world_size)
    backend = TorchBackend(grid, rank, make_lane_groups(grid, rank, TIMEOUT, device))
    streams = CudaStreams(device)
    lanes = make_lanes(streams)
    send_first_messages(backend, lanes, device)
    session = Session(" ".join(flags), RankPlace(backend, lanes, device, streams))
    session.microbatches = microbatches
    for step in range(STEPS):
        _train(session, step)
    memory = read_memory(device)
    forget_counts()
    session.forward_backward(STEPS)
    in_backward = calls()
    session.engine.update(learning_rate=1e-4)
    session.engine.finish_updates()
    need = session.need
    found = {
        "peak_bytes": memory.max_allocated_bytes,
        "reserved_bytes": memory.max_reserved_bytes,
        "planned_bytes": need.beside(need.device).total,
        "units": len(session.engine.units),
        "microbatches": session.microbatches,
        "calls_in_backward": in_backward,
        "calls": calls(),
    }
    write_json(file.with_suffix(f".{rank}.json"), found)
    dist.barrier()
    session.close()


def calls() -> dict[str, int]:
    """The counts without names of kernels, which are long."""
    return {name: number for name, number in counts().items() if not name.startswith(KERNEL)}


def _train(session: Session, step: int) -> None:
    session.forward_backward(step)
    session.engine.update(learning_rate=1e-4)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)
