"""Flags of profiles."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import COUNT, POSITIVE_COUNT, flag, needs, unless


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of a few iterations, and records of memory."""

    profile: bool = flag(
        False,
        help="Write a Chrome trace of a few iterations, by torch.profiler.",
        needs=needs("profile_dir", "tensorboard_dir", what="a folder for its traces"),
    )
    profile_step_start: int = flag(
        10,
        help="Number of iterations that this process runs before the profile starts.",
        unit="iterations",
        allowed=COUNT,
        without_effect=unless("profile"),
    )
    profile_step_end: int = flag(
        12,
        help="Number of iterations of this process after which the profile ends; above --profile-step-start.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        without_effect=unless("profile"),
    )
    profile_ranks: tuple[str, ...] = flag(
        (),
        help="Ranks that write profiles and memory records.",
        unit="ranks",
        otherwise="0",
        without_effect=unless("profile", "record_memory_history"),
    )
    profile_dir: str | None = flag(
        None, help="Folder for the traces.", unit="path", otherwise="--tensorboard-dir", without_effect=unless("profile")
    )
    nvtx_ranges: bool = flag(False, help="Name units, hops and phases of every step for Nsight Systems, as NVTX ranges (GPUs only).")
    record_memory_history: bool = flag(
        False, help="Record every allocation on the GPU, and write a snapshot for pytorch.org/memory_viz at the end (GPUs only)."
    )
    memory_snapshot_path: str = flag(
        "snapshot.pickle",
        help="File of that snapshot; the rank is inserted before its extension.",
        unit="path",
        without_effect=unless("record_memory_history"),
    )
