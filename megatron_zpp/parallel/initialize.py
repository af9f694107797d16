"""Joining the world: a device, a process group, and one verdict on start-up errors that every rank shares."""

from __future__ import annotations

import gc
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_zpp.parallel.failures.attempt import own_part
from megatron_zpp.parallel.failures.failure_board import FailureBoard
from megatron_zpp.parallel.failures.roll_call import RollCall
from megatron_zpp.parallel.launch import Launch

PACKAGE = Path(__file__).parents[1]
FAREWELL = timedelta(seconds=15)  # to find out who failed, tell the others and end


class StartupError(ValueError):
    """A user's mistake that every rank knows of; its text names the ranks that met it."""


class World:
    """The ranks of this run, joined. Every rank must make the same calls in the same order, but for `report_failure`."""

    def __init__(self, launch: Launch, device: torch.device, timeout: timedelta) -> None:
        """Joins: gloo for CPU tensors always, NCCL for CUDA tensors on GPUs. One rank alone needs no launcher.

        timeout: within which every rank has ended after a link or a rank is gone; a collective may take all of it but the farewell.
        Raises ValueError where the launcher did not say where rank 0 is.
        """
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.device = device
        self.collective_timeout = max(timeout - FAREWELL, timeout / 2)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._store = _join_store(launch, timeout)
        self._failure_board = FailureBoard(self._store, launch.rank, launch.world_size)
        self._reported: str | None = None
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=self._store, rank=launch.rank, world_size=launch.world_size, timeout=self.collective_timeout)

    def hosts(self) -> list[str]:
        """The host name of every rank, in rank order."""
        return gather_texts(socket.gethostname())

    @contextmanager
    def agreement(self, long_work: str | None = None, announce: Callable[[str], None] = print) -> Iterator[None]:
        """Runs a block of start-up checks; a ValueError on any rank in it becomes a StartupError on every rank when all have left it.

        One that is no user's mistake prints its traceback as well.

        The block must not wait for other ranks, since one of them may have left it early. long_work: what it does, where that may take
        longer than a collective may; announce then gets a line now and then while this rank waits for others.
        """
        error = None
        roll_call = RollCall(self._store, self.rank, self.world_size, long_work or "", self.check_others)
        with roll_call.after(announce) if long_work is not None and self.world_size > 1 else nullcontext():
            try:
                yield
            except ValueError as mistake:
                error = str(mistake)
                if not is_mistake(mistake):
                    traceback.print_exc()
        self.agree_on_errors(error)

    def agree_on_errors(self, error: str | None) -> None:
        """Nothing, where no rank met an error. Raises StartupError on every rank alike, with one line per distinct message."""
        errors = gather_texts(error or "")
        if any(errors):
            raise StartupError(joined_errors(errors))

    def report_failure(self, text: str) -> str:
        """The first failure that any rank has reported, `text` of this rank if there was none before; one rank reports once."""
        self._reported = self._reported or self._failure_board.report(text)
        return self._reported

    def check_others(self) -> None:
        """Nothing, while no rank is known to have failed. Raises RuntimeError once one has."""
        self._failure_board.check()

    def leave(self) -> None:
        """Ends the process groups; no message may be under way. Every rank must call it.

        What still holds a collective goes now: gloo's threads must not be left to free it while the interpreter shuts down.
        """
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()


def choose_device(launch: Launch, backend: str | None) -> torch.device:
    """The device of this rank: a GPU where there is one and the backend is not gloo, else the CPU.

    Raises ValueError where a machine has fewer GPUs than ranks, or NCCL is asked for without a GPU.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and devices == 0:
        raise ValueError(
            "--distributed-backend nccl needs a GPU and this machine shows none; leave the flag out to run on the CPU over gloo"
        )
    if backend == "gloo" or devices == 0:
        return torch.device("cpu")
    shares_device = "NCCL_HOSTID" in os.environ  # NCCL takes ranks with different host ids on one device for different machines
    if launch.local_rank >= devices and not shares_device:
        raise ValueError(
            f"local rank {launch.local_rank} finds only {devices} GPUs on this machine; start at most {devices} ranks per machine, "
            "or let each rank see all GPUs of its machine (srun --gpu-bind=none)"
        )
    return torch.device("cuda", launch.local_rank % devices)


def is_mistake(error: ValueError) -> bool:
    """Whether a `raise` in this package made the error, whose text then says what the user can do; any other one is a bug."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return PACKAGE in Path(innermost.filename).parents and (innermost.line or "raise").startswith("raise")


def gather_texts(text: str) -> list[str]:
    """Each rank's `text`, in rank order; every rank must call it."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def joined_errors(errors: Sequence[str]) -> str:
    """One line per distinct message of `errors[rank]`, with the ranks that met it where not all did."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(errors):
        if text:
            ranks_of.setdefault(text, []).append(rank)
    lines = []
    for text, ranks in ranks_of.items():
        met_everywhere = len(ranks) == len(errors)
        lines.append(text if met_everywhere else f"{text} (on rank {', '.join(map(str, ranks))} of {len(errors)})")
    return "\n".join(lines)


def _join_store(launch: Launch, timeout: timedelta) -> dist.Store:
    if launch.master_address is None:
        if launch.world_size == 1:
            return dist.HashStore()
        raise ValueError("MASTER_ADDR is not set: start with torchrun, or export MASTER_ADDR (the host of rank 0) and MASTER_PORT")
    os.environ.update(MASTER_ADDR=launch.master_address, MASTER_PORT=str(launch.master_port))
    store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    return own_part(dist.PrefixStore("megatron_zpp", store), launch.rank, launch.world_size, timeout)
