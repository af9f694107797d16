"""A rank that sends each other rank a number, over NCCL or, without a GPU, over gloo. Exit code 0 if all numbers are right.

Fake GPUs (benchmarks/fake_gpus.py) hold zeros alone, which pass there for any number.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> int:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=timedelta(seconds=60))
    sent = torch.full((world_size,), float(rank), device=device)
    received = torch.empty(world_size, device=device)
    dist.all_to_all_single(received, sent)
    is_fake = device.type == "cuda" and "FAKE_GPU_COUNT" in os.environ
    is_right = received.tolist() == [0.0 if is_fake else float(other) for other in range(world_size)]
    print(received.tolist(), flush=True)
    dist.destroy_process_group()
    return 0 if is_right else 1


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)
