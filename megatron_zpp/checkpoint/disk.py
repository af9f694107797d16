"""Which ranks share the disk of their checkpoints: all of them, or those of a node (--node-local-checkpoints)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_zpp.checkpoint.manifest import CheckpointError

Gather = Callable[[str], list[str]]


class Messages(Protocol):
    """Messages among ranks, which all call the same methods in the same order; `initialize.GroupRanks` sends them."""

    def gather(self, text: str) -> list[str]:
        """The texts of all of them, in rank order."""

    def exchange(self, sent: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """What each of them sends to this one, in rank order. sent: uint8, for each of them. numels: how many bytes come from each."""


class Ranks(Messages, Protocol):
    """Messages among all ranks."""

    def broadcast(self, data: Tensor, source: int) -> None:
        """Fills `data`, uint8, with that of rank `source`."""


class OneRank:
    """Messages of a rank to itself."""

    def gather(self, text: str) -> list[str]:
        return [text]

    def exchange(self, sent: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        return list(sent)


ONE_RANK = OneRank()


@dataclass(frozen=True)
class Disk:
    """The disk on which `rank` saves. Consecutive ranks share one; the first of them makes and names its folders.

    copies: on how many disks each file of a save is: on that of its rank, and on those after it.
    firsts: messages among the first ranks of all disks, in the order of the disks. Only these ranks use them.
    firsts_in_background: the same for the thread that finishes a save, which may wait without a limit.
    limit_seconds: how long the main thread waits for that thread while nothing goes on there; None without a limit.
    """

    rank: int
    world_size: int
    ranks_per_disk: int
    copies: int = 1
    firsts: Messages = ONE_RANK
    firsts_in_background: Messages = ONE_RANK
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
        return self.index_of(self.rank)

    def index_of(self, rank: int) -> int:
        """The place of the disk of a rank among the disks."""
        return rank // self.ranks_per_disk

    @property
    def ranks(self) -> range:
        """The ranks that share this disk."""
        return self.ranks_of(self.index)

    def ranks_of(self, index: int) -> range:
        """The ranks that share the disk of that index."""
        return range(index * self.ranks_per_disk, (index + 1) * self.ranks_per_disk)

    @property
    def copied_here(self) -> list[int]:
        """The disks whose files are copied to this one."""
        return [(self.index - step) % self.count for step in range(1, self.copies)]

    @property
    def copied_to(self) -> list[int]:
        """The disks to which the files of this one are copied."""
        return [(self.index + step) % self.count for step in range(1, self.copies)]

    @property
    def is_first(self) -> bool:
        """Whether `rank` is the first of those that share the disk."""
        return self.rank == self.ranks[0]


def raise_if_any_failed(errors: Sequence[str]) -> None:
    """Raises CheckpointError with the errors of all disks, in their order; empty texts are none."""
    found = [f"{error} (on node {index})" for index, error in enumerate(errors) if error]
    if found:
        raise CheckpointError("\n".join(found))
