"""Describes the machine: GPU, driver, compilers and libraries. A machine without a GPU that can be used is not done.

Nothing else runs if this part does not pass. So what cannot be described is omitted, and only a GPU that does not compute is a failure.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sysconfig
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.device_errors import in_words
from benchmarks.gpu.outcome import NotDone, Outcome

PROGRAMS = ("nvcc", "ninja", "gcc", "git", "ncu", "compute-sanitizer")
PACKAGES = ("setuptools", "triton", "safetensors", "sentencepiece", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cublas")
SHARED_MEMORY = "/dev/shm"
# An estimate, for a communicator and rank of NCCL 2.28. Four ranks have up to six communicators each.
NCCL_SHARED_BYTES, RANKS, COMMUNICATORS = 34 << 20, 4, 6


def run(time: Deadline, outcome: Outcome) -> None:
    try:
        _try(outcome, _describe_host)
        _try(outcome, _measure_shared_memory)
        _use_gpu(outcome)
        _try(outcome, _describe_gpu)
    finally:
        outcome.say(*(f"{name}: {fact}" for name, fact in outcome.measured.items()))


def _try(outcome: Outcome, describe: Callable[[Outcome], None]) -> None:
    try:
        describe(outcome)
    except Exception as error:
        outcome.omit(f"a description of this machine: {in_words(error)}")


def _describe_host(outcome: Outcome) -> None:
    outcome.measure(
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        processor=_first_line_with("model name", ["cat", "/proc/cpuinfo"]).rpartition(": ")[2],
        memory_gibibytes=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        disk_free_gibibytes=round(shutil.disk_usage(".").free / 2**30),
        interfaces=[name for _, name in socket.if_nameindex()],
        limits={
            name: resource.getrlimit(limit)[0]
            for name, limit in {"files": resource.RLIMIT_NOFILE, "locked": resource.RLIMIT_MEMLOCK}.items()
        },
        nvcc=_first_line_with("release", [_found("nvcc") or "nvcc", "--version"]),
        driver=_first_line_with(
            ".", ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,temperature.gpu", "--format=csv,noheader"]
        ),
        missing=[name for name in PROGRAMS if _found(name) is None] + [name for name in PACKAGES if _version(name) is None],
        packages={name: found for name in PACKAGES if (found := _version(name)) is not None},
    )


def _measure_shared_memory(outcome: Outcome) -> None:
    """NCCL's ranks on one machine meet in this folder, which is small in a container."""
    needed = NCCL_SHARED_BYTES * RANKS * COMMUNICATORS
    free = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else 0
    outcome.measure(shared_memory_free_mebibytes=free >> 20)
    if free < needed:
        outcome.omit(
            f"perhaps {RANKS} NCCL ranks: {SHARED_MEMORY} has {free >> 20} MiB free, and NCCL may take {needed >> 20} MiB; "
            f"mount -t tmpfs -o size=16g tmpfs {SHARED_MEMORY}"
        )


def _use_gpu(outcome: Outcome) -> None:
    """Raises NotDone without a GPU, and an error if it runs no kernel."""
    import numpy
    import torch

    outcome.measure(torch=torch.__version__, numpy=numpy.__version__, cuda=str(torch.version.cuda))
    with warnings.catch_warnings(record=True) as caught:  # torch says there why it finds no GPU, for example if the driver is too old
        warnings.simplefilter("always")
        has_gpu = torch.cuda.is_available()
    if not has_gpu:
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        why = "".join(f"; {one.message}" for one in caught)
        raise NotDone(f"everything on a GPU: torch finds none here (torch {torch.__version__} is built for {built_for}{why})")
    torch.ones(8, device="cuda").sum().item()


def _describe_gpu(outcome: Outcome) -> None:
    import torch

    properties = torch.cuda.get_device_properties(0)
    outcome.measure(
        gpus=torch.cuda.device_count(),
        gpu=properties.name,
        architecture=f"sm_{properties.major}{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        gpu_gibibytes=round(properties.total_memory / 2**30, 1),
        free_gibibytes=round(torch.cuda.mem_get_info()[0] / 2**30, 1),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        cudnn=torch.backends.cudnn.version(),  # an error if the cuDNN that is found first is another than torch was built for
    )


def _found(program: str) -> str | None:
    """Its path: on PATH, or beside this Python, whose environment may not be active."""
    return shutil.which(program) or shutil.which(program, path=sysconfig.get_path("scripts"))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line_with(text: str, command: list[str]) -> str:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "missing"
    return next((line.strip() for line in finished.stdout.splitlines() if text in line), "no answer")
