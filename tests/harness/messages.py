"""Messages of ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from harness.patience import PATIENCE_SECONDS
from harness.worlds import Barrier


class Messages:
    """The messages of ranks in threads. most_sent: the most bytes that a rank has sent at a time. gathers: how many there were of texts."""

    def __init__(self, world_size: int) -> None:
        self._barrier = Barrier(world_size, timeout=PATIENCE_SECONDS)
        self._shown: list[Any] = [None] * world_size
        self.most_sent = 0
        self.gathers = 0

    def of(self, rank: int) -> RankMessages:
        return RankMessages(self, rank)

    def lose_a_rank(self) -> None:
        """Ends every wait with an error, now and later."""
        self._barrier.abort()

    def show(self, rank: int, value: Any) -> list[Any]:
        self._shown[rank] = value
        self._barrier.wait()
        shown = list(self._shown)
        self._barrier.wait()
        return shown


class RankMessages:
    """The messages of one rank, see `disk.Ranks`."""

    def __init__(self, world: Messages, rank: int) -> None:
        self._world = world
        self._rank = rank

    def gather(self, text: str) -> list[str]:
        if self._rank == 0:
            self._world.gathers += 1
        return self._world.show(self._rank, text)

    def exchange(self, sent: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        received = [parts[self._rank].clone() for parts in self._world.show(self._rank, sent)]
        assert [part.numel() for part in received] == list(numels)
        self._world.most_sent = max(self._world.most_sent, sum(part.numel() for part in sent))
        return received

    def broadcast(self, data: Tensor, source: int) -> None:
        data.copy_(self._world.show(self._rank, data.clone())[source])
