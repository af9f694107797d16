"""Flags of ranks and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import POSITIVE_MINUTES, POSITIVE_RANKS, flag, when

CONTEXT_EXCHANGES = ("a2a", "p2p", "allgather", "a2a+p2p")


@dataclass(frozen=True)
class DistributedConfig:
    """Ranks, nodes and their communication."""

    tensor_model_parallel_size: int = flag(
        1,
        help="Ranks that share every layer and its samples; must divide the ranks of a node.",
        unit="ranks",
        allowed=POSITIVE_RANKS,
    )
    sequence_parallel: bool = flag(
        False,
        help="Between the layers, each of the ranks that share them has only its own part of the tokens.",
        without_effect=when(tensor_model_parallel_size=1),
    )
    context_parallel_size: int = flag(
        1,
        help="Ranks that divide the tokens of every sample among themselves; must divide the ranks that do not share layers.",
        unit="ranks",
        aliases=("--ds-sequence-parallel-size",),
        allowed=POSITIVE_RANKS,
    )
    cp_comm_type: str = flag(
        "a2a",
        help="How attention sees whole samples that ranks divide: they exchange tokens for heads (a2a). The other kinds are refused.",
        allowed=CONTEXT_EXCHANGES,
        without_effect=when(context_parallel_size=1),
    )
    ranks_per_node: int = flag(
        None,
        help="Ranks of one node; must divide the number of ranks.",
        unit="ranks",
        allowed=POSITIVE_RANKS,
        otherwise="the launcher's LOCAL_WORLD_SIZE, LOCAL_SIZE or SLURM_NTASKS_PER_NODE",
    )
    distributed_timeout_minutes: int = flag(
        10,
        help="Every rank ends within this time after a rank or a link is lost; a collective may take up to 15 seconds less.",
        unit="minutes",
        allowed=POSITIVE_MINUTES,
    )
    distributed_backend: str | None = flag(
        None, help="Communication library.", allowed=("nccl", "gloo"), otherwise="nccl with GPUs, gloo without"
    )
