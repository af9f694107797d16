"""Flags of outer steps between islands (DiLoCo, arXiv 2311.08105)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import COUNT, FRACTION, POSITIVE, POSITIVE_COUNT, POSITIVE_RANKS, flag, needs
from megatron_zpp.config.groups.zero import GAUSSIAN_BITS, WORKING_DTYPE_BITS

OUTER_BITS = (*GAUSSIAN_BITS, WORKING_DTYPE_BITS)


@dataclass(frozen=True)
class DilocoConfig:
    """Islands train copies of the model by themselves, and agree on weights from time to time."""

    diloco_sync_period: int | None = flag(
        None,
        help="DiLoCo: every island of nodes trains a copy of the model by itself, and exchanges each unit of it with the others every so "
        "many iterations. It is another optimizer, not a way to send the same step.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        otherwise="one world without islands",
    )
    diloco_islands: int = flag(
        None,
        help="Islands: equal groups of neighbouring nodes; must divide the number of nodes.",
        unit="islands",
        allowed=POSITIVE_RANKS,
        otherwise="every node is one; 1 without --diloco-sync-period",
        needs=needs("diloco_sync_period"),
    )
    diloco_start_iteration: int | None = flag(
        None,
        help="Until this iteration islands take the plain mean of their weights after every step. An earlier one than the end of the "
        "warmup of the learning rate loses much: outer momentum that has seen a warmup alone throws the model away.",
        unit="iterations",
        allowed=COUNT,
        otherwise="the end of the warmup of the learning rate",
        needs=needs("diloco_sync_period"),
    )
    diloco_outer_lr: float | None = flag(
        None,
        help="Learning rate of the outer step.",
        unit="1",
        allowed=POSITIVE,
        otherwise="--diloco-sync-period / 40, at most 0.7",
        needs=needs("diloco_sync_period"),
    )
    diloco_outer_momentum: float = flag(
        0.9, help="Nesterov momentum of the outer step.", unit="1", allowed=FRACTION, needs=needs("diloco_sync_period")
    )
    diloco_outer_bits: int = flag(
        3,
        help="Bits of an outer gradient between islands; 16 is the working precision.",
        unit="bits",
        allowed=OUTER_BITS,
        needs=needs("diloco_sync_period"),
    )
    diloco_difference_bits: int = flag(
        3,
        help="Bits of a change of an outer weight between islands; 16 is the working precision.",
        unit="bits",
        allowed=OUTER_BITS,
        needs=needs("diloco_sync_period"),
    )
    diloco_all_at_once: bool = flag(
        False,
        help="All units are exchanged after the same iteration. By default units take turns, so that every iteration sends about as much.",
        needs=needs("diloco_sync_period"),
    )
    diloco_overlap_steps: int = flag(
        0,
        help="1: an exchange is under way during the next iteration, too, and the island keeps what it learns in it. For links with a long "
        "round trip, or slow for a unit.",
        unit="iterations",
        allowed=(0, 1),
        needs=needs("diloco_sync_period"),
    )

    @property
    def has_islands(self) -> bool:
        """Whether there are islands, which outer steps join; one alone makes them, too."""
        return self.diloco_sync_period is not None
