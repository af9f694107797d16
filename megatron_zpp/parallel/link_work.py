"""What the ranks of a tensor link or a context link exchange in one use of a model (no torch)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinkWork:
    """Bytes that one rank receives over one link in the forward or the backward of one use, for one micro-batch.

    blocking_bytes: computation waits for them. overlapped_bytes: on their way while backward computes gradients of the same layer.
    """

    blocking_bytes: int = 0
    overlapped_bytes: int = 0
    collectives: int = 0

    @property
    def nbytes(self) -> int:
        return self.blocking_bytes + self.overlapped_bytes

    def __rmul__(self, times: int) -> LinkWork:
        return LinkWork(times * self.blocking_bytes, times * self.overlapped_bytes, times * self.collectives)

    def __add__(self, other: LinkWork) -> LinkWork:
        return LinkWork(
            self.blocking_bytes + other.blocking_bytes,
            self.overlapped_bytes + other.overlapped_bytes,
            self.collectives + other.collectives,
        )


@dataclass(frozen=True)
class LinkWorkOfUses:
    """The work of every use in forward, and in backward with what recomputation repeats; empty if the link has one rank.

    hiding: the computation beside which overlapped bytes are on their way, as a share of the use's forward.
    """

    forward: tuple[LinkWork, ...] = ()
    backward: tuple[LinkWork, ...] = ()
    hiding: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of one micro-batch."""
        return sum(work.nbytes for work in (*self.forward, *self.backward))

    @property
    def collectives(self) -> int:
        """Collectives of one micro-batch."""
        return sum(work.collectives for work in (*self.forward, *self.backward))

    def of(self, use: int, *, is_backward: bool) -> LinkWork:
        works = self.backward if is_backward else self.forward
        return works[use] if works else LinkWork()


NO_LINK_WORK = LinkWorkOfUses()
