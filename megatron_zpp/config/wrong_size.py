"""An error about a number of ranks. Its remedy names numbers that break no other rule, which only the whole configuration can say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_zpp.config.flag import FlagError, any_of, flags_in, nearest, spelling_of


@dataclass(frozen=True)
class Proposal:
    """Numbers of ranks in place of one that breaks a rule.

    broken: the rule. field: of the number's flag. size: the wrong number. sizes: those that keep the rule, with 1. choose, also: the words
    before and after them. start: another remedy, which is to start so many times the ranks per node (`more`); "" if there is none.
    """

    broken: str
    field: str
    size: int
    sizes: Sequence[int]
    choose: str = "choose"
    also: str = ""
    start: str = ""
    more: int = 1

    def __str__(self) -> str:
        start = f", or {self.start}" if self.start else ""
        return f"{self.broken}; {self.choose} {any_of(nearest(self.sizes, self.size))}{self.also}{start}."

    def without_other_errors(self, next_error: Callable[[int, int], str]) -> Proposal:
        """The proposal without what ends in another error. If every size does, it keeps what ends in an error about the same flag as 1.

        next_error: the error of a run with this size, and so many times the ranks per node; "" if there is none.
        """
        found = {size: _first_flag(next_error(size, 1)) for size in self.sizes}
        left = None if None in found.values() else found[1]
        sizes = [size for size, flag in found.items() if flag == left]
        also = f" and another {left}" if left and left != spelling_of(self.field) else ""
        start = self.start if self.start and _first_flag(next_error(self.size, self.more)) == left else ""
        return replace(self, sizes=sizes, also=also, start=start)


class WrongSize(FlagError):
    """Raised for a number of ranks that breaks a rule. finish: makes the text of that of a proposal."""

    def __init__(self, proposal: Proposal, finish: Callable[[str], str] = str) -> None:
        super().__init__(finish(str(proposal)))
        self.proposal = proposal
        self.finish = finish

    def finished_by(self, finish: Callable[[str], str]) -> WrongSize:
        return WrongSize(self.proposal, lambda text: finish(self.finish(text)))


def _first_flag(error: str) -> str | None:
    """The first flag that an error names, "" if it names none; None if there is no error."""
    return next(iter(flags_in(error)), "" if error else None)
