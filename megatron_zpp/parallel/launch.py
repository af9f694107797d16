"""The place of this process in the world, as its launcher says it (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What the launcher said of this process; local_world_size is None where it did not say."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None


def read_launch(environment: Mapping[str, str]) -> Launch:
    """The place of this process, from the variables of torchrun or of DeepSpeed's launcher, else Slurm's, else one rank on its own.

    Raises ValueError naming the variable that is missing or not a number.
    """
    if "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environment else "LOCAL_SIZE")
    elif "SLURM_PROCID" in environment and _number(environment, "SLURM_NTASKS") > 1:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    else:
        return Launch(0, 1, 0, 1)
    rank, world_size = (_number(environment, name) for name in names[:2])
    local_rank = _number(environment, names[2])
    local_world_size = _number(environment, names[3]) if names[3] in environment else None
    if rank >= world_size:
        raise ValueError(f"the launcher set {names[0]}={rank} and {names[1]}={world_size}; ranks count from 0, so correct one of them")
    return Launch(rank, world_size, local_rank, local_world_size)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise ValueError(
            f"the launcher set {name}={text!r} where a whole number is needed; start with torchrun, srun, deepspeed or plain python"
        )
    return int(text)
