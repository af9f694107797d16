"""Flags of --dry-run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import NOT_NEGATIVE, POSITIVE, POSITIVE_RANKS, flag, needs

A_PLAN = needs("dry_run")


@dataclass(frozen=True)
class PlanConfig:
    """The plan that --dry-run prints, for any world. Only --dry-run uses these flags."""

    dry_run: bool = flag(
        False, help="Check every flag, print the plan of the run (memory per rank, bytes per link, tokens, time) and end; needs no GPU."
    )
    nodes: int | None = flag(
        None, help="Nodes of the planned world, of --ranks-per-node ranks each.", unit="nodes", allowed=POSITIVE_RANKS, needs=A_PLAN
    )
    world_size: int | None = flag(
        None,
        help="Number of ranks of the planned world; needs --nodes or --ranks-per-node.",
        unit="ranks",
        allowed=POSITIVE_RANKS,
        otherwise="--nodes x --ranks-per-node, or the launcher's world",
        needs=A_PLAN,
    )
    device: str = flag(
        None,
        help="Kind of device that is planned for.",
        allowed=("gpu", "cpu"),
        otherwise="gpu; cpu with --distributed-backend gloo",
        needs=A_PLAN,
    )
    memory_gigabytes: float | None = flag(
        None,
        help="Memory of each rank; a plan that needs more is refused, as the run would be at start-up.",
        unit="GB",
        allowed=POSITIVE,
        needs=A_PLAN,
    )
    host_memory_gigabytes: float | None = flag(
        None,
        help="Memory of each node's host, which its ranks share; a plan that needs more is refused.",
        unit="GB",
        allowed=POSITIVE,
        needs=A_PLAN,
    )
    teraflops: float | None = flag(
        None,
        help="Speed that a rank sustains while it computes, with recomputation counted; without it no time is planned.",
        unit="TFLOP/s",
        allowed=POSITIVE,
        needs=A_PLAN,
    )
    inter_gigabits: float | None = flag(
        None, help="Rate of the link between a node and the others, in each direction.", unit="Gbit/s", allowed=POSITIVE, needs=A_PLAN
    )
    inter_milliseconds: float = flag(
        0.0,
        help="Round trip between two nodes, as ping shows it.",
        unit="ms",
        allowed=NOT_NEGATIVE,
        needs=A_PLAN,
    )
    intra_gigabytes: float = flag(
        100.0, help="Rate at which one rank receives from the other ranks of its node.", unit="GB/s", allowed=POSITIVE, needs=A_PLAN
    )
