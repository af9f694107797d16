"""Which ranks share the disk of their checkpoints: all of them, or those of a node (--node-local-checkpoints)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Gather = Callable[[str], list[str]]


@dataclass(frozen=True)
class Disk:
    """The disk on which `rank` saves. Consecutive ranks share one; the first of them makes and names its folders.

    gather_firsts: returns the texts of the first ranks of all disks, in the order of the disks. Only these ranks call it.
    gather_in_background: the same for another thread, one at a time, which may wait without a limit.
    limit_seconds: how long the main thread waits for that thread, once all files are written; None without a limit.
    """

    rank: int
    world_size: int
    ranks_per_disk: int
    gather_firsts: Gather = lambda text: [text]
    gather_in_background: Gather = lambda text: [text]
    limit_seconds: float | None = None

    @classmethod
    def of_all(cls, rank: int, world_size: int) -> Disk:
        """The disk that all ranks share."""
        return cls(rank, world_size, world_size)

    @property
    def count(self) -> int:
        """The number of disks."""
        return self.world_size // self.ranks_per_disk

    @property
    def index(self) -> int:
        """The place of this one among the disks."""
        return self.rank // self.ranks_per_disk

    @property
    def ranks(self) -> range:
        """The ranks that share this disk."""
        return self.ranks_of(self.index)

    def ranks_of(self, index: int) -> range:
        """The ranks that share the disk of that index."""
        return range(index * self.ranks_per_disk, (index + 1) * self.ranks_per_disk)

    @property
    def is_first(self) -> bool:
        """Whether `rank` is the first of those that share the disk."""
        return self.rank == self.ranks[0]
